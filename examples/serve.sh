#!/usr/bin/env bash
# Serve a model and LoRA adapters with KV offload to host memory and Redis.
#
# Usage:   examples/serve.sh MODEL NAME=ADAPTER_DIRECTORY...
# Example: python examples/tiny_model.py /tmp/tiny &&
#          examples/serve.sh /tmp/tiny/model civil=/tmp/tiny/civil legal=/tmp/tiny/legal
#
# The one line that turns the connector on is --kv-transfer-config.  Settings come from an
# LMCache-style YAML file; several servers with the same model, adapters and Redis share KV.
# --shutdown-timeout lets running requests end and queued KV reach Redis; without it vLLM ends
# its engine at once.
# PYTHON names the interpreter that vLLM is installed for, PORT the port to listen on;
# more vLLM options go into VLLM_OPTIONS.
set -euo pipefail

if (($# < 2)); then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
fi
model=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
export ELORA_CONFIG_FILE=${ELORA_CONFIG_FILE:-$root/configs/host_only.yaml}

# shellcheck disable=SC2086  # VLLM_OPTIONS is a list of words.
exec "${PYTHON:-python3}" -m vllm.entrypoints.openai.api_server \
    --model "$model" \
    --port "${PORT:-8000}" \
    --enable-lora \
    --max-loras 2 \
    --lora-modules "$@" \
    --shutdown-timeout 10 \
    --kv-transfer-config '{"kv_connector":"EloraConnector","kv_role":"kv_both"}' \
    ${VLLM_OPTIONS:-}
