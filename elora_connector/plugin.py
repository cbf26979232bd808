"""vLLM's entry point (`vllm.general_plugins`): runs in every vLLM process, before any
LoRA manager, scheduler or connector exists there."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

CONNECTOR = "EloraConnector"
CONNECTOR_MODULE = "elora_connector.integration.vllm.connector"

_loaded = False


def register() -> None:
    """Install the hooks and make the connector known by its name; idempotent.

    Never raises because of a vLLM that does not fit: users who do not ask for the
    connector must not suffer from it.  Creating the connector raises then.
    """
    global _loaded  # noqa: PLW0603  (a fact of the process)
    if _loaded:
        return
    from elora_connector.errors import UnsupportedError
    from elora_connector.integration.vllm import compat

    compat.register_connector(CONNECTOR, CONNECTOR_MODULE)
    try:
        compat.install()
    except UnsupportedError as error:
        logger.warning("%s", error)
        return
    _loaded = True


def plugin_loaded() -> bool:
    """Did `register` succeed in this process, that is, early enough?"""
    return _loaded
