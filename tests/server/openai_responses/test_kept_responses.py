"""Stored responses: conversations that continue, their items, and who may read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import openai
import pytest
from support.echo.echoed_responses import THOUGHT, WEATHER, events_of

from appliance.errors import RequestError
from appliance.server.openai_responses import history
from appliance.server.openai_responses.schema import InputPart, Item, ResponsesRequest
from appliance.server.openai_responses.turns import turns_of
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.server.conftest import Serve


async def test_a_conversation_goes_on_from_a_response(
    serve: Serve, tokenizer: Tokenizer, seen: list[Any]
) -> None:
    async with serve(tokenizer=tokenizer, max_model_len=1024) as running:
        responses = running.openai.responses
        first = await responses.create(
            model="echo", input=THOUGHT, tools=[WEATHER], instructions="Be brief."
        )
        assert first.output_text == "Be brief.", "they come first, and are repeated"
        first = await responses.create(model="echo", input=THOUGHT, tools=[WEATHER])
        call = first.output[2]
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
        second = await responses.create(
            model="echo", previous_response_id=first.id, input=[result], max_output_tokens=2
        )
        third = await responses.create(
            model="echo", previous_response_id=second.id, input="And?", max_output_tokens=2
        )
        assert third.previous_response_id == second.id
        turns = seen[-1][0]
        roles = [turn["role"] for turn in turns]
        assert roles == ["user", "assistant", "tool", "assistant", "user"]
        assert turns[1]["reasoning_content"] == "Hm, 🎈."
        assert turns[1]["tool_calls"][0]["id"] == turns[2]["tool_call_id"] == call.call_id
        assert turns[4]["content"] == "And?"
        kept = await responses.retrieve(second.id)
        assert kept == second
        listed = await responses.input_items.list(third.id)
        (own,) = listed.data
        assert own.type == "message"
        assert own.content[0].type == "input_text"
        assert own.content[0].text == "And?"
        await responses.delete(second.id)
        with pytest.raises(openai.NotFoundError, match="not kept"):
            await responses.retrieve(second.id)
        with pytest.raises(openai.BadRequestError, match="not kept") as gone:
            await responses.create(model="echo", previous_response_id=second.id, input="?")
        assert gone.value.code == "previous_response_not_found"
        assert gone.value.param == "previous_response_id"
        await responses.create(model="echo", previous_response_id=third.id, input="?")
        streamed = await events_of(running, input="hi", previous_response_id=third.id)
        assert (await responses.retrieve(streamed[-1]["response"]["id"])).status == "completed"


async def test_input_items_come_in_pages(serve: Serve) -> None:
    async with serve() as running:
        inputs: list[Any] = [{"role": "user", "content": str(number)} for number in range(5)]
        response = await running.openai.responses.create(model="echo", input=inputs)
        path = f"/v1/responses/{response.id}/input_items"

        async def page(**asked: Any) -> dict[str, Any]:
            return (await running.http.get(path, params=asked)).json()  # type: ignore[no-any-return]

        first = await page(limit=2)
        assert [item["content"] for item in first["data"]] == ["4", "3"]
        assert first["has_more"]
        rest = await page(after=first["last_id"])
        assert [item["content"] for item in rest["data"]] == ["2", "1", "0"]
        assert not rest["has_more"]
        assert (await page(order="asc"))["first_id"] == rest["last_id"]
        for wrong in ({"limit": 0}, {"limit": "x"}, {"after": "nothing"}):
            refused = await running.http.get(path, params=wrong)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] in wrong


async def test_items_are_named_or_carried_by_clients(
    serve: Serve, tokenizer: Tokenizer, seen: list[Any]
) -> None:
    async with serve(tokenizer=tokenizer, max_model_len=1024) as running:
        responses = running.openai.responses
        first = await responses.create(
            model="echo",
            input=THOUGHT,
            tools=[WEATHER],
            include=["reasoning.encrypted_content"],
        )
        thought, said, *calls = first.output
        assert thought.type == "reasoning"
        assert thought.encrypted_content
        named: list[Any] = [{"type": "item_reference", "id": item.id} for item in first.output]
        carried: list[Any] = [
            {"type": "reasoning", "id": "rs_1", "summary": []}
            | {"encrypted_content": thought.encrypted_content},
            *(item.model_dump() for item in (said, *calls)),
        ]
        question: Any = {"role": "user", "content": "And?"}
        for items in (named, carried):
            await responses.create(
                model="echo", input=[question, *items], tools=[WEATHER], max_output_tokens=2
            )
        (by_name, *_), (by_carrying, *_) = seen[-2:]
        assert by_name == by_carrying
        assert by_name[1]["reasoning_content"] == "Hm, 🎈."
        assert len(by_name[1]["tool_calls"]) == 2
        without = await responses.create(model="echo", input=THOUGHT, tools=[WEATHER])
        assert "encrypted_content" not in without.output[0].model_dump(exclude_unset=True)


async def test_a_key_never_reads_what_is_kept_for_another(serve: Serve) -> None:
    async with serve(
        server={"api_key": "master-key", "api_keys": {"ann": "a-key-of-ann"}}
    ) as running:
        master, ann = running.openai, running.openai.with_options(api_key="a-key-of-ann")
        own = await ann.responses.create(model="echo", input="secret")
        assert (await ann.responses.retrieve(own.id)).output_text == "user\nsecret"
        with pytest.raises(openai.NotFoundError):
            await master.responses.retrieve(own.id)
        with pytest.raises(openai.NotFoundError):
            await master.responses.delete(own.id)
        with pytest.raises(openai.BadRequestError):
            await master.responses.create(model="echo", input="?", previous_response_id=own.id)
        item: Any = [{"type": "item_reference", "id": own.output[0].id}]
        with pytest.raises(openai.BadRequestError, match="is not kept"):
            await master.responses.create(model="echo", input=item)
        await ann.responses.create(model="echo", input=item)


async def test_what_is_not_to_be_kept_is_not(serve: Serve) -> None:
    async with serve() as running:
        response = await running.openai.responses.create(model="echo", input="hi", store=False)
        assert response.model_dump()["store"] is False
        with pytest.raises(openai.NotFoundError):
            await running.openai.responses.retrieve(response.id)


async def test_what_no_prompt_shows_of_an_item_is_not_kept(
    serve: Serve, tokenizer: Tokenizer, seen: list[Any]
) -> None:
    empty: Any = {"type": "reasoning", "id": "rs_0", "summary": []}
    told: Any = {"type": "reasoning", "id": "rs_1", "encrypted_content": "A" * 100_000}
    told |= {"summary": [{"type": "summary_text", "text": "Hm."}]}
    question: Any = {"role": "user", "content": "?"}
    async with serve(tokenizer=tokenizer, max_model_len=1024) as running:
        responses = running.openai.responses
        first = await responses.create(
            model="echo", input=[*[empty] * 1000, told, question], max_output_tokens=2
        )
        kept = (await responses.input_items.list(first.id)).data
        assert [item.type for item in reversed(kept)] == ["reasoning", "message"]
        assert len(kept[1].model_dump_json()) < 500
        await responses.create(
            model="echo", previous_response_id=first.id, input="And?", max_output_tokens=2
        )
        assert seen[-1][0][0]["reasoning_content"] == "Hm."


async def test_references_and_conversations_have_limits(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAX_CONVERSATION", 3000)
    question: Any = {"role": "user", "content": "x" * 800}
    async with serve(server={"max_body_bytes": 2000}, max_model_len=4096) as running:
        responses = running.openai.responses
        first = await responses.create(model="echo", input=[question], max_output_tokens=2)
        (item,) = (await responses.input_items.list(first.id)).data
        reference: Any = {"type": "item_reference", "id": item.id}
        await responses.create(model="echo", input=[reference, reference], max_output_tokens=2)
        with pytest.raises(openai.BadRequestError, match="at most 2,000") as refused:
            await responses.create(model="echo", input=[reference] * 3)
        assert refused.value.param == "input"
        last = first.id
        for _ in range(2):
            again = await responses.create(
                model="echo", previous_response_id=last, input=[question], max_output_tokens=2
            )
            last = again.id
        with pytest.raises(openai.BadRequestError, match="at most 3,000") as refused:
            await responses.create(model="echo", previous_response_id=last, input=[question])
        assert refused.value.param == "previous_response_id"


def test_pictures_of_conversations_and_references_have_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "MAX_CONVERSATION", 1000)
    monkeypatch.setattr(history, "PICTURE_BYTES", 5000)
    store = history.ResponseStore()

    def read(*, before: str | None = None, refer: int = 0, picture: int = 0) -> history.ReadInput:
        parts = [InputPart(type="input_image", image_url="data:;base64," + "A" * picture)]
        items = [Item(type="item_reference", id="msg_1")] * refer
        if picture:
            items.append(Item(type="message", role="user", id="msg_1", content=parts))
        body = ResponsesRequest(model="echo", input=items, previous_response_id=before)
        return history.InputReader(store, "ann", body, max_bytes=1000).read()

    found = read(picture=2400)
    assert len(found.own) < 1000 < 2400, "they are not counted as texts"
    store.keep("ann", "first", found.kept_with(b'{"status":"completed"}', b"[]", ()))
    again = read(before="first", picture=2400)
    assert again.picture_bytes == 2 * len("data:;base64,") + 4800
    assert len(again.pictures) == 1
    assert len(read(refer=2).items) == 2
    for asked, param in (
        ({"picture": 5001}, "input"),
        ({"before": "first", "picture": 3000}, "previous_response_id"),
        ({"refer": 3}, "input"),
        ({"refer": 2, "picture": 1000}, "input"),
    ):
        with pytest.raises(RequestError, match="at most 5,000") as refused:
            read(**asked)
        assert refused.value.param == param


def test_ten_turns_about_a_picture_hold_it_once() -> None:
    store, data = history.ResponseStore(), "A" * 400_000
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
    first: list[Any] = [{"role": "user", "content": [image]}]
    before = None
    for turn in range(10):
        items = first if turn == 0 else [{"role": "user", "content": f"{turn}"}]
        body = msgspec.convert({"input": items, "previous_response_id": before}, ResponsesRequest)
        found = history.InputReader(store, "ann", body, max_bytes=1 << 20).read()
        before = f"resp_{turn}"
        store.keep("ann", before, found.kept_with(b'{"status":"completed"}', b"[]", ()))
    kept = store.kept_by("ann")
    assert sum(one.size for one in kept) < 20_000
    assert len({id(url) for one in kept for url in one.pictures.values()}) == 1
    (shown, *_) = kept[-1].items()
    assert msgspec.to_builtins(shown)["content"] == [image]
    assert msgspec.json.decode(kept[0].own_items())[0]["content"] == [image]
    forged = {"type": "input_image", "image_url": next(iter(kept[-1].pictures))}
    body = msgspec.convert({"input": [{"role": "user", "content": [forged]}]}, ResponsesRequest)
    found = history.InputReader(store, "bob", body, max_bytes=1 << 20).read()
    with pytest.raises(RequestError, match="addresses are not fetched"):
        turns_of(None, found.before.items(), found.items)
