"""Whether a model of the Hugging Face hub can be had, said within seconds: left to themselves the libraries try an
unreachable hub again and again for half a minute."""

from __future__ import annotations

import logging
import os
import threading

logger = logging.getLogger(__name__)

#: A hub that does not answer by then counts as unreachable, unless this variable of its client says another time.
ANSWER_TIMEOUT_S, TIMEOUT_VARIABLE = 3.0, "HF_HUB_ETAG_TIMEOUT"
#: Looking its name up has a time of its own, which nothing but waiting bounds.
LOOKUP_TIMEOUT_S = 2.0


def is_only_cached(model_id: str) -> bool:
    """Whether nothing but the local cache can be asked for the model; False: the hub answers.

    Raises ValueError: the cache does not have it either; the text is one line."""
    from huggingface_hub import constants, try_to_load_from_cache

    is_cached = isinstance(try_to_load_from_cache(model_id, "config.json"), str)
    if constants.HF_HUB_OFFLINE:
        if is_cached:
            return True
        raise ValueError(
            f"no such directory, and no such model in the cache, {constants.HF_HUB_CACHE}; HF_HUB_OFFLINE forbids to "
            f"ask {constants.ENDPOINT}; allowed: a checkpoint directory, or a hub id in the cache"
        )
    reason = _why_unreachable(model_id)
    if reason is None:
        return False
    if is_cached:
        logger.warning("%s can't be reached (%s): %s is taken from the cache", constants.ENDPOINT, reason, model_id)
        return True
    raise ValueError(
        f"no such directory, no such model in the cache, {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} can't be "
        f"reached ({reason}; {TIMEOUT_VARIABLE}=SECONDS waits longer); allowed: a checkpoint directory, or a hub id "
        f"that is in the cache or can be fetched"
    )


def _why_unreachable(model_id: str) -> str | None:
    """None: the hub answered, be it with a refusal, which whoever loads the model explains."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    timeout_s = float(constants.HF_HUB_ETAG_TIMEOUT) if TIMEOUT_VARIABLE in os.environ else ANSWER_TIMEOUT_S
    answers: list[str | None] = []

    def ask() -> None:
        from huggingface_hub.errors import HfHubHTTPError

        try:
            get_hf_file_metadata(hf_hub_url(model_id, "config.json"), timeout=timeout_s)
        except HfHubHTTPError:
            answers.append(None)
        except Exception as error:  # noqa: BLE001 - of whichever HTTP library the hub's client uses
            answers.append(f"{type(error).__name__}: {' '.join(str(error).split())}"[:200])
        else:
            answers.append(None)

    thread = threading.Thread(target=ask, name="hub-probe", daemon=True)
    thread.start()
    thread.join(timeout_s + LOOKUP_TIMEOUT_S)
    return answers[0] if answers else f"no answer within {timeout_s + LOOKUP_TIMEOUT_S:g} s"
