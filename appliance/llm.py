"""Runs the engine in a script, without a server.

from appliance import LLM, SamplingParams
answers = LLM().generate(["Once upon a time"], SamplingParams(max_tokens=50))
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from appliance.config import EngineConfig, load_section, warn_of_unknown_variables
from appliance.dialects.turns import prepare
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import AdapterRef, FinishReason, Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.run.adapters.adapter_names import AdapterRegistry
from appliance.errors import ChatTemplateError, ConfigError, EngineError, RequestError
from appliance.hub.found_model import find_model_of
from appliance.hub.growth import ignore_progress
from appliance.media.pictures import Pictures
from appliance.model_files.sampling_defaults import choose_defaults
from appliance.pictures import Attached, laid_out, of_image, of_url, read_pictures, texts_beside
from appliance.text import ChoiceText, Likelihood, best, stop_pieces, vocabulary_of, with_logprobs
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from appliance.dialects.turns import Turn
    from appliance.engine.nouns.messages import SequenceDelta, TokenLogprobs
    from appliance.engine.nouns.picture import PromptPictures

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
        cumulative_logprob: natural logarithm of its probability under the model; None unless
            `logprobs`, `best_of` or beam search needs it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """All answers to one prompt; best first with `best_of` or beam search.

    Attributes:
        prompt_token_ids: with an id of 0 for each row of a picture, which has no token.
        prompt_logprobs: of each prompt token after the first, or behind the last picture, if they
            are asked for.
    """

    prompt: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class _Prompt(NamedTuple):
    """A prompt as the engine takes it, and its text without pictures."""

    text: str
    ids: list[int]
    pictures: PromptPictures | None = None


class LLM:
    """A loaded model that answers many prompts at once.

    Args:
        model: folder, .gguf file or hub id; empty means the settings' model, else the packaged
            default.
        options: any field of `config.EngineConfig`, such as `device` or `kv_cache_memory="2GiB"`.
            They override the environment and the configuration file, as a server's flags do.

    Attributes:
        default_sampling: the makers' recommendation with 16 tokens; equals `SamplingParams()` with
            `generation_config="off"`.

    Raises:
        ApplianceError: the model cannot be found, read or fitted; the message says what to do.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        given = {**options, "model": model or None}
        config = load_section(EngineConfig, given, spell="LLM option {}".format)
        warn_of_unknown_variables()
        if config.replicas > 1:
            raise ConfigError(
                f"replicas is {config.replicas}, and a script has one engine; serve the model"
                " instead, or set replicas=1"
            )
        resolved, config = find_model_of(config)
        config = msgspec.structs.replace(config, model=str(resolved.path))
        self._adapters = AdapterRegistry(config, resolved.name)
        self.path = str(resolved.path)
        self.tokenizer = Tokenizer.from_path(resolved.path)
        self.engine = load_llm_engine(
            config,
            eos_token_ids=self.tokenizer.eos_token_ids,
            metadata=None,
            on_progress=ignore_progress,
        )
        recommended = choose_defaults(
            config.generation_config, self.tokenizer.sampling, resolved.sampling
        )
        self.default_sampling = SamplingParams(**recommended.values)  # type: ignore[arg-type]
        self._pictures = (
            Pictures.of_model(resolved.path, config.image_tokens, self.engine.info.projector)
            if self.engine.info.reads_pictures
            else None
        )
        self._next_id = 0
        self._has_vocabulary = False

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, in the given order.

        Args:
            prompts: one text, or a list of texts and lists of token ids. With pictures, a mapping
                in vLLM's form: `{"prompt": "...<image>...", "multi_modal_data": {"image": ...}}`,
                or with "prompt_token_ids"; the model's placeholder stands for each picture, and the
                value is one or a list of PIL images, paths, bytes of files or data URLs.
            sampling_params: one for all, or one per prompt; None means `default_sampling`.
            adapter: name of an adapter from the options `lora` or `lora_dir`; None means the base
                model.
            progress: show a bar on stderr with prompts done and tokens per second.

        Raises:
            RequestError: a prompt exceeds the context, a picture cannot be read, or the adapter is
                unknown; none was started.
            EngineError: the engine could not finish a prompt.
        """
        batch = [prompts] if isinstance(prompts, str | Mapping) else prompts
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling = [sampling_params or self.default_sampling] * len(batch)
        else:
            sampling = list(sampling_params)
            if len(sampling) != len(batch):
                raise ValueError(f"{len(batch)} prompts but {len(sampling)} sampling_params")
        given = [self._prompt(prompt) for prompt in batch]
        return self._run(given, sampling, self._adapter(adapter), progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        progress: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, in the model's chat format.

        Args:
            messages: `[{"role": ..., "content": ...}, ...]`, or a list of such lists. A content may
                be a list of parts: `{"type": "text", "text": ...}`, `{"type": "image", "image":
                ...}` with a PIL image, a path, a file's bytes or a data URL, or OpenAI's
                `image_url` with a data URL.
            sampling_params: one for all; None means `default_sampling`.
            adapter: as in `generate`.
            progress: as in `generate`.
            continue_final_message: go on in the last message, an answer's beginning.

        Raises:
            ChatTemplateError: the model has no chat template.
        """
        if self.tokenizer.chat_template is None:
            raise ChatTemplateError("this model has no chat template; use generate() instead")
        self.tokenizer.isolate_template()  # the checkpoint's author is a stranger here too
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        continues = "content" if continue_final_message else None
        prompts = [self._chat_prompt(conversation, continues) for conversation in conversations]
        if sampling_params is None:
            sampling_params = self.default_sampling
        sampling = [sampling_params] * len(prompts)
        return self._run(prompts, sampling, self._adapter(adapter), progress)

    def close(self) -> None:
        """End the processes that render chats and read pictures; the next of either starts one."""
        self.tokenizer.close()
        if self._pictures is not None:
            self._pictures.close()

    def _prompt(self, prompt: Any) -> _Prompt:
        given = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        content = given.get("prompt", given.get("prompt_token_ids"))
        if content is None:
            raise RequestError("a prompt that is a mapping needs prompt or prompt_token_ids")
        images = given.get("multi_modal_data", {}).get("image", [])
        images = images if isinstance(images, list | tuple) else [images]
        parts = [_attached(image, "multi_modal_data").part for image in images]
        _, pictures = read_pictures([{"role": "user", "content": parts}], self._pictures)
        if isinstance(content, str):
            beside = texts_beside(pictures, self._pictures)
            ids = self.tokenizer.encode(content, add_special_tokens=True, beside=beside)
        else:
            ids, content = list(content), self.tokenizer.decode(content)
        return _Prompt(content, *laid_out(ids, pictures, self._pictures, self.tokenizer))

    def _chat_prompt(
        self, conversation: Sequence[Mapping[str, Any]], continues: str | None
    ) -> _Prompt:
        attached = [_turn(turn, place) for place, turn in enumerate(conversation)]
        told, pictures = read_pictures(attached, self._pictures)
        turns, _ = prepare(self.tokenizer.dialect, told, None)
        beside = texts_beside(pictures, self._pictures)
        ids = self.tokenizer.encode_chat(turns, continues=continues, beside=beside)
        text = self.tokenizer.decode(ids)
        return _Prompt(text, *laid_out(ids, pictures, self._pictures, self.tokenizer))

    def _adapter(self, name: str | None) -> AdapterRef | None:
        if name is None:
            return None
        found = self._adapters.find(name)
        if found is None:
            names = ", ".join(self._adapters.names()) or "none; see the options lora and lora_dir"
            raise RequestError(f"no adapter is named {name!r}; there are: {names}", param="adapter")
        return found

    def _run(
        self,
        prompts: list[_Prompt],
        sampling: list[SamplingParams],
        adapter: AdapterRef | None,
        progress: bool,
    ) -> list[RequestOutput]:
        runs: dict[str, _Run] = {}
        try:
            for prompt, params in zip(prompts, sampling, strict=True):
                request = Request(
                    request_id=str(self._next_id),
                    prompt_token_ids=tuple(prompt.ids),
                    sampling=with_logprobs(params),
                    stop_pieces=stop_pieces(self.tokenizer, params),
                    adapter=adapter,
                    pictures=prompt.pictures,
                )
                self._next_id += 1
                if params.grammar is not None and not self._has_vocabulary:
                    self.engine.set_vocabulary(vocabulary_of(self.tokenizer))
                    self._has_vocabulary = True
                self.engine.submit(request)
                runs[request.request_id] = _Run(self.tokenizer, request, prompt.text)
            with _bar(len(runs), enabled=progress) as advance:
                while self.engine.has_work:
                    for delta in self.engine.step().deltas:
                        self._take(runs[delta.request_id], delta, advance)
        except BaseException:
            for request_id in runs:
                self.engine.abort(request_id)
            raise
        return [
            run.finished(with_logprobs=params.logprobs is not None)
            for run, params in zip(runs.values(), sampling, strict=True)
        ]

    def _take(self, run: _Run, delta: SequenceDelta, advance: Callable[[bool, int], None]) -> None:
        if delta.error is not None:
            raise EngineError(delta.error)
        was_open = run.open
        # Drop tokens of the same step that follow a stop string.
        stopped = [run.take(one) for one in delta.one_by_one()]
        if any(stopped) and delta.finish_reason is None:
            self.engine.abort(delta.request_id, delta.index)
        advance(was_open > 0 and run.open == 0, len(delta.token_ids))


def _turn(turn: Mapping[str, Any], place: int) -> Turn:
    """Return a message with its pictures attached.

    Raises:
        RequestError: a part is of an unknown kind.
    """
    if not isinstance(turn["content"], list | tuple):
        return dict(turn)
    parts = []
    for index, part in enumerate(turn["content"]):
        where = f"messages[{place}].content[{index}]"
        match part:
            case {"type": "image", "image": image}:
                parts.append(_attached(image, where).part)
            case {"type": "image_url", "image_url": {"url": str(url)} | str(url)}:
                parts.append(of_url(url, where).part)
            case {"type": "text", "text": str()}:
                parts.append(dict(part))
            case _:
                raise RequestError(
                    f"{where} is no part of a message; write text, image or image_url"
                )
    return {**turn, "content": parts}


def _attached(image: Any, where: str) -> Attached:
    """Take a picture that a script has: a PIL image, a path, a file's bytes or a data URL.

    Raises:
        RequestError: it is none of them, or there is no such file.
    """
    if isinstance(image, bytes):
        return Attached(image, where)
    if isinstance(image, str) and image.startswith("data:"):
        return of_url(image, where)
    if isinstance(image, str | Path):
        try:
            return Attached(Path(image).expanduser().read_bytes(), where)
        except OSError as error:
            raise RequestError(f"{where}: {image} cannot be read: {error.strerror}") from None
    return of_image(image, where)


class _Run:
    """A running prompt: its answers and each one's text."""

    def __init__(self, tokenizer: Tokenizer, request: Request, prompt: str) -> None:
        self._sampling = request.sampling
        choices = range(request.sampling.num_choices)
        self.output = RequestOutput(
            prompt, list(request.prompt_token_ids), [CompletionOutput(index) for index in choices]
        )
        self.open = len(choices)
        self._texts = [ChoiceText(tokenizer, request.sampling.stop) for _ in choices]
        self._likelihoods = [Likelihood() for _ in choices]

    def take(self, delta: SequenceDelta) -> bool:
        """Add a delta; return True if a stop string ended a choice that the engine still runs."""
        choice = self.output.outputs[delta.index]
        if choice.finish_reason is not None:
            return False
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, delta.num_cached_tokens)
        text, choice.finish_reason = self._texts[delta.index].push(
            delta.token_ids, delta.finish_reason
        )
        self.output.prompt_logprobs += delta.prompt_logprobs or ()
        choice.text += text
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs or ()
        self._likelihoods[delta.index].add(delta)
        self.open -= choice.finish_reason is not None
        return choice.finish_reason is not None and delta.finish_reason is None

    def finished(self, *, with_logprobs: bool) -> RequestOutput:
        """Return the requested answers, in order."""
        if self._sampling.logprobs is not None or self._sampling.use_beam_search:
            for choice, likelihood in zip(self.output.outputs, self._likelihoods, strict=True):
                choice.cumulative_logprob = likelihood.cumulative_logprob
        if self._sampling.takes_best:
            places = best(self._likelihoods, self._sampling.n)
            self.output.outputs = [self.output.outputs[place] for place in places]
            for index, choice in enumerate(self.output.outputs):
                choice.index = index
                if not with_logprobs:
                    choice.logprobs = []
        return self.output


@contextlib.contextmanager
def _bar(total: int, *, enabled: bool) -> Iterator[Callable[[bool, int], None]]:
    """Draw a progress bar on stderr if enabled; yield `advance(prompt_finished, new_tokens)`."""
    if not enabled:
        yield lambda finished, tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as progress:
        task = progress.add_task("prompts", total=total, tokens=0)
        generated = 0

        def advance(finished: bool, tokens: int) -> None:
            nonlocal generated
            generated += tokens
            progress.update(task, advance=int(finished), tokens=generated)

        yield advance
