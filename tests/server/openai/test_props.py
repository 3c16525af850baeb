"""GET /props, in the fields that llama-server documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from support.runs.waiting import until

from appliance.engine.process.supervisor import EngineState
from appliance.model_files.sampling_defaults import SamplingDefaults

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server.conftest import Serve

# Those of tools/server/README.md of llama.cpp that are the same here, with its example's types;
# `model_alias` and `audio` are newer than its example.
DOCUMENTED: dict[str, Any] = {
    "default_generation_settings": {
        "n_ctx": int,
        "params": {
            "n_predict": int,
            "temperature": float,
            "top_k": int,
            "top_p": float,
            "min_p": float,
            "repeat_penalty": float,
            "repeat_last_n": int,
            "presence_penalty": float,
            "frequency_penalty": float,
        },
    },
    "total_slots": int,
    "model_alias": str,
    "model_path": str,
    "chat_template": str,
    "modalities": {"vision": bool, "audio": bool},
    "build_info": str,
    "is_sleeping": bool,
}


def kinds_of(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: kinds_of(value) for name, value in found.items()}
    return type(found)


async def test_a_model_is_described_as_llama_server_does(
    serve: Serve, tokenizer_folder: Path
) -> None:
    async with serve(max_num_seqs=3) as running:
        answer = await running.http.get("/props")
        assert answer.status_code == 200
        assert str(tokenizer_folder) not in answer.text
        found = answer.json()
        assert kinds_of(found) == DOCUMENTED
        settings = found["default_generation_settings"]
        assert (settings["n_ctx"], found["total_slots"]) == (512, 3)
        assert settings["params"]["temperature"] == 1.0
        assert (found["model_alias"], found["model_path"]) == ("echo", "echo")
        assert "<|im_start|>" in found["chat_template"]
        assert found["modalities"] == {"vision": False, "audio": False}
        values = {"temperature": 0.2, "top_k": 7, "repetition_penalty": 1.1}
        running.state.sampling = SamplingDefaults(values, "a test")
        found = (await running.http.get("/props")).json()
        params = found["default_generation_settings"]["params"]
        assert [params[name] for name in ("temperature", "top_k", "repeat_penalty")] == [
            0.2,
            7,
            1.1,
        ]


async def test_the_model_is_named_in_the_query(serve: Serve) -> None:
    server = {"models_memory": 25 << 20}
    half = f"needs={20 << 20}"
    async with serve(half, server=server, others={"b": half}, aliases={"gpt": "b"}) as running:

        async def props(model: str) -> Any:
            return await running.http.get("/props", params={"model": model})

        assert (await props("echo")).json()["is_sleeping"] is False
        assert (await props("gpt")).status_code == 503, "it was never loaded"
        missing = await props("other")
        assert missing.status_code == 404
        assert "'other' is not served here" in missing.json()["error"]["message"]
        await running.complete("x", model="b", max_tokens=1)
        await until(lambda: running.state.engine.state is EngineState.ASLEEP)
        assert (await props("gpt")).json()["model_alias"] == "b"
        asleep = (await props("echo")).json()
        assert asleep["is_sleeping"] is True
        assert running.state.engine.state is EngineState.ASLEEP, "asking does not wake it"
