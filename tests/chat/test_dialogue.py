from __future__ import annotations

import stat
from pathlib import Path

import pytest

from appliance.chat.answer import ChatAnswer
from appliance.chat.dialogue import Attachment, Dialogue, Turn, without_dropped
from appliance.errors import ConfigError


def test_a_request_holds_all_that_was_said() -> None:
    talk = Dialogue("m", "Be brief.", {"top_k": 3}, [Turn("a", "b")])
    body = talk.body(Turn("c"))
    assert [(one["role"], one["content"]) for one in body["messages"]] == [
        ("system", "Be brief."),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
    ]
    assert (body["model"], body["top_k"], body["stream"]) == ("m", 3, True)
    assert Dialogue("m").body(Turn("c"))["messages"] == [{"role": "user", "content": "c"}]


def test_pictures_stay_with_their_question_and_come_before_it(tmp_path: Path) -> None:
    (tmp_path / "a.JPG").write_bytes(b"abc")
    picture = Attachment.of_file(tmp_path / "a.JPG")
    assert picture.url == "data:image/jpeg;base64,YWJj"
    talk = Dialogue("m", turns=[Turn("what?", "a cat", (picture,))])
    asked, _, more = talk.body(Turn("why?"))["messages"]
    assert asked["content"] == [
        {"type": "image_url", "image_url": {"url": picture.url}},
        {"type": "text", "text": "what?"},
    ]
    assert more["content"] == "why?"
    talk.save(tmp_path / "talk.json")
    other = Dialogue("m")
    other.load(tmp_path / "talk.json")
    assert other.turns == talk.turns
    with pytest.raises(ConfigError, match="No such file"):
        Attachment.of_file(tmp_path / "b.png")


def test_files_that_are_dropped_into_a_question_are_found(tmp_path: Path) -> None:
    """As terminals write a dropped file: quoted, escaped, or as a URL."""
    folder = tmp_path / "my pictures"
    folder.mkdir()
    for name in ("cat.png", "it's.webp", "notes.txt"):
        (folder / name).write_bytes(b"x")
    cat, other = folder / "cat.png", folder / "it's.webp"
    escaped = str(cat).replace(" ", "\\ ")
    for written in (
        f"'{cat}'",
        f'"{cat}"',
        escaped,
        f"file://{folder}/cat.png".replace(" ", "%20"),
    ):
        assert without_dropped(f"what is {written} here?") == ("what is here?", [cat])
        assert without_dropped(written) == ("", [cat])
    assert without_dropped(f'{escaped} or "{other}" ?') == ("or ?", [cat, other])
    for words in (
        f"'{folder}/notes.txt' says",
        "/none/cat.png is  not there",
        f"a{escaped}",
        "what/cat.png",
        "it costs ~50 dollars",
        "~nobody-here/cat.png",
        f"/{'a' * 300}.png",
    ):
        assert without_dropped(words) == (words, [])
    code = "def f():\n    return 1"
    assert without_dropped(f"{code}\n{escaped} \n  {code}") == (f"{code}\n\n  {code}", [cat])


def test_sampling_is_a_number_of_its_type_or_the_servers() -> None:
    talk = Dialogue("m")
    talk.set("top_k", "5")
    talk.set("temperature", "0.5")
    assert talk.sampling == {"top_k": 5, "temperature": 0.5}
    talk.set("top_k", "")
    assert talk.sampling == {"temperature": 0.5}
    for name, text, says in (("top_k", "0.5", "must be a number"), ("heat", "1", "none of")):
        with pytest.raises(ConfigError, match=says):
            talk.set(name, text)


def test_a_saved_conversation_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    Dialogue("m", "sys", turns=[Turn("é", "ü")]).save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = Dialogue("n")
    other.load(path)
    assert (other.system, other.turns, other.model) == ("sys", [Turn("é", "ü")], "n")


@pytest.mark.parametrize("text", ["{}", "no json", '{"turns": [{}]}', '{"turns": 3}', "[]"])
def test_a_file_that_is_no_conversation_changes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    talk = Dialogue("m", turns=[Turn("a", "b")])
    with pytest.raises(ConfigError, match="holds no conversation"):
        talk.load(tmp_path / "x")
    with pytest.raises(ConfigError, match="No such file"):
        talk.load(tmp_path / "y")
    with pytest.raises(ConfigError, match="cannot be written"):
        talk.save(tmp_path / "none" / "y")
    assert talk.turns == [Turn("a", "b")]


def test_the_line_after_an_answer() -> None:
    answer = ChatAnswer("x", "length", 10.0, 10.5, 12.5, 30, 16, 41)
    assert answer.in_words(142) == (
        "41 tokens; 20.0 tokens/s; first token 0.50 s; prompt 30, 16 of them cached;"
        " 50% of the context; cut off at the limit of tokens"
    )
    assert ChatAnswer().in_words(100) == ""
    assert ChatAnswer(begin=1, first=2, last=2).in_words(None) == "first token 1.00 s"
