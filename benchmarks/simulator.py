"""Speed of the simulator: 10,000 requests of 100 adapters on one core.

    python -m benchmarks.simulator [--requests 10000] [--adapters 100] [--policy elora]

Prints one JSON object: CPU seconds of the replay (generation apart), steps, requests a
second, and the peak memory of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

from elora_connector.simulator.build import build
from elora_connector.simulator.engine import Replay
from elora_connector.simulator.engine_model import engine_model
from elora_connector.simulator.models import MACHINES
from elora_connector.simulator.systems import system_named
from elora_connector.simulator.workloads import Demand, make_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--memory", type=float, default=0.4)
    parser.add_argument("--policy", default="elora")
    parser.add_argument("--workload", default="chat")
    options = parser.parse_args()
    started = time.process_time()
    demand = Demand(adapters=options.adapters, rate=options.rate, requests=options.requests)
    trace = make_workload(options.workload, demand)
    generated = time.process_time()
    machine = engine_model(MACHINES["llama3-8b"], 32, memory=options.memory)
    record = Replay(trace, build(system_named(options.policy), machine, trace)).run()
    replayed = time.process_time()
    seconds = replayed - generated
    figures = {
        "requests": options.requests,
        "adapters": options.adapters,
        "policy": options.policy,
        "generation_cpu_s": round(generated - started, 2),
        "replay_cpu_s": round(seconds, 2),
        "requests_per_s": round(options.requests / seconds, 1),
        "steps": record.steps,
        "evicted": record.summary()["evicted_chunks"],
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
