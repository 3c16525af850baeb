"""Routes that load and unload adapters, as in vLLM."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response

from appliance.config.api_keys import BARE_NAME
from appliance.engine.nouns.request import AdapterRef
from appliance.engine.run.adapters.adapter_names import NAME
from appliance.errors import RequestError
from appliance.files import stamp_of
from appliance.server.http.body import read_json
from appliance.server.http.openapi import describes
from appliance.server.http.request_middleware import key_name

if TYPE_CHECKING:
    from appliance.engine.run.adapters.adapter_names import AdapterRegistry
    from appliance.server.models.model_state import ModelState
    from appliance.server.models.state import ServerState

logger = logging.getLogger(__name__)


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False  # if the name exists, it now means these files


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str


class AdapterForbiddenError(RequestError):
    """This key may not manage adapters, or this path is outside the allowed folder."""

    status = 403
    type = "permission_error"


class UnknownAdapterError(RequestError):
    """No adapter has this name."""

    status = 404
    type = "not_found_error"


def adapters_router(server: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/load_lora_adapter", **describes(LoadAdapterRequest, None))
    async def load_lora_adapter(request: Request) -> Response:
        """Load an adapter of the first model from the allowed folder."""
        state = server.default
        _check_key(state, request)
        body, _ = await read_json(
            request, LoadAdapterRequest, max_bytes=state.config.max_body_bytes
        )
        ref = _asked_for(state.adapters, body)
        known = state.adapters.find(body.lora_name)
        models = {model.model_id for model in server.models} | server.aliases.keys()
        if body.lora_name in models or (
            known is not None and known.path != ref.path and not body.load_inplace
        ):
            raise RequestError(
                f"the name {body.lora_name[:100]!r} is taken; take another one, or set"
                " load_inplace",
                param="lora_name",
            )
        state.serving()
        await state.engine.adapters.load(ref)
        state.adapters.add(ref.name, Path(ref.path))
        logger.info("adapter %s is loaded from %s", ref.name, ref.path)
        return Response(f"Success: LoRA adapter '{ref.name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", **describes(UnloadAdapterRequest, None))
    async def unload_lora_adapter(request: Request) -> Response:
        """Unload an adapter; requests that use it run to their end."""
        state = server.default
        _check_key(state, request)
        body, _ = await read_json(
            request, UnloadAdapterRequest, max_bytes=state.config.max_body_bytes
        )
        ref = state.adapters.find(body.lora_name)
        if ref is None:
            raise UnknownAdapterError(
                f"no adapter is named {body.lora_name[:100]!r}; there are:"
                f" {', '.join(state.adapters.names()) or 'none'}",
                param="lora_name",
            )
        state.adapters.remove(ref.name)
        state.engine.adapters.unload(ref)
        used = [one.adapter for one, _ in state.engine.open_requests() if one.adapter is not None]
        users = sum((one.path, one.stamp) == (ref.path, ref.stamp) for one in used)
        left = f" {users} open requests go on with it." if users else ""
        return Response(f"Success: LoRA adapter '{ref.name}' removed successfully.{left}")

    return router


def _check_key(state: ModelState, request: Request) -> None:
    if state.several_keys and key_name(request.scope) != BARE_NAME:
        raise AdapterForbiddenError("only the key without a name loads and unloads adapters")


def _asked_for(adapters: AdapterRegistry, body: LoadAdapterRequest) -> AdapterRef:
    """Return the adapter to load.

    Raises:
        AdapterForbiddenError: the path is outside the allowed folder, or no folder is allowed.
        RequestError: the path holds no adapter, or the name is invalid.
    """
    if adapters.folder is None:
        raise AdapterForbiddenError(
            "no folder of adapters is allowed; start the server with --lora-dir"
        )
    if not NAME.fullmatch(body.lora_name):
        raise RequestError(
            "a name has letters, digits, and . _ - inside, at most 128", param="lora_name"
        )
    path = (adapters.folder / body.lora_path).resolve()
    if not path.is_relative_to(adapters.folder) or path == adapters.folder:
        raise AdapterForbiddenError(
            f"adapters are loaded from inside {adapters.folder} only", param="lora_path"
        )
    stamp = stamp_of(path)
    if not stamp:
        raise RequestError(f"there is no adapter at {body.lora_path[:200]!r}", param="lora_path")
    return AdapterRef(body.lora_name, str(path), stamp)
