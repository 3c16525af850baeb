"""Every error a person can cause or meet, as one tree.

ApplianceError
├── ConfigError            a flag, environment variable or config key          exit 2
├── ModelError             a model that cannot be used                         exit 3
│   ├── CheckpointError    a weight file that is cut, wrong or unsafe
│   ├── UnsupportedModelError
│   ├── AdapterError       an adapter that cannot be used with the model
│   ├── ChatTemplateError  no template, or one that fails to render
│   └── QualityError       its quality card fails a condition
├── MemoryPlanError        weights + KV cache + workspace do not fit           exit 4
├── QuantizeError          quantization could not finish                       exit 5
│   └── ChangedRunError    a state that another run left
├── RequestError           a request that is refused; HTTP status on the class
│   ├── ContextLengthError
│   ├── ImageError         a picture that cannot be read or used
│   │   └── ImageTooLargeError
│   ├── UnknownModelError
│   ├── AuthError
│   ├── RequestAbortedError
│   ├── QuarantinedError   engines ended while they worked on it
│   ├── QueueFullError
│   └── QueueTimeoutError  it waited too long; nothing was computed
└── EngineError            the engine process failed or is missing             exit 6
    ├── EngineDiedError
    └── EngineUnavailableError

Messages say what is wrong and what to do about it, in one line. It imports nothing of ours.
"""

from __future__ import annotations


class ApplianceError(Exception):
    """Root of the tree; the command line exits with `exit_code`."""

    exit_code = 1


class ConfigError(ApplianceError):
    """A setting that is unknown, of the wrong type or out of range."""

    exit_code = 2


class ModelError(ApplianceError):
    """The model cannot be used as it is."""

    exit_code = 3


class CheckpointError(ModelError):
    """A weight file that is truncated, inconsistent, missing or of an unsafe kind."""


class UnsupportedModelError(ModelError):
    """No code here supports this architecture, tensor type or option."""


class AdapterError(ModelError):
    """The adapter is damaged, belongs to another model, or needs something unsupported."""


class ChatTemplateError(ModelError):
    """The model has no chat template, or its template does not render these messages."""


class QualityError(ModelError):
    """The model's quality card fails a condition, or is missing."""


class MemoryPlanError(ApplianceError):
    """Weights, KV cache and workspace exceed the available memory."""

    exit_code = 4


class QuantizeError(ApplianceError):
    """Quantization stopped; no incomplete file has the result's name."""

    exit_code = 5


class ChangedRunError(QuantizeError):
    """A resumed run differs from the one that saved the state."""


class RequestError(ApplianceError):
    """A refused request, in the terms of the OpenAI error body.

    Args:
        message: one line with the error and the accepted values.
        param: the field at fault, if any.
        code: the API's machine-readable word, if it defines one.
    """

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt, or prompt plus completion, exceeds the model's context."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ImageError(RequestError):
    """A picture that is damaged, of an unknown format, or that the model cannot take."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="invalid_image")


class ImageFetchError(ImageError):
    """A picture's address that is not fetched, or does not answer."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param)
        self.code = "image_fetch_failed"


class ImageTooLargeError(ImageError):
    """A picture of too many bytes or pixels."""

    status = 413

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param)
        self.code = "image_too_large"


class UnknownModelError(RequestError):
    """The server does not serve the model that the request names."""

    status = 404

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model", code="model_not_found")


class AuthError(RequestError):
    """The key is missing or wrong."""

    status = 401
    type = "authentication_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")


class RequestAbortedError(RequestError):
    """The server's administrator ended the request; clients do not retry on this status."""

    status = 410
    type = "request_aborted"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="request_aborted")


class QuarantinedError(RequestError):
    """Engines died while they ran this request; the server refuses it for a while."""

    status = 500
    type = "server_error"

    def __init__(self, seconds: float) -> None:
        super().__init__(
            "this request ends the engine: twice one died while it worked on it, so it is refused "
            f"for {max(1.0, seconds / 60):.0f} min; send another one, and report what the log says",
            code="request_ends_engine",
        )


class QueueFullError(RequestError):
    """The queue is full; `retry_after` is in seconds."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message, code="queue_full")
        self.retry_after = retry_after


class QueueTimeoutError(RequestError):
    """The request waited too long and never started; `retry_after` is in seconds."""

    status = 503
    type = "server_error"
    retry_after = 2

    def __init__(self, message: str) -> None:
        super().__init__(message, code="queue_timeout")


class EngineError(ApplianceError):
    """The engine cannot serve requests now."""

    exit_code = 6


class EngineDiedError(EngineError):
    """The engine process ended while it ran this request.

    Args:
        message: the cause.
        by_itself: False if someone stopped it.
    """

    def __init__(self, message: str, *, by_itself: bool = True) -> None:
        super().__init__(message)
        self.by_itself = by_itself


class EngineUnavailableError(EngineError):
    """The engine is loading, restarting or shutting down.

    Args:
        retry_after: seconds until it may be ready; None if unknown.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def one_line(error: Exception) -> str:
    """Return what a library's error says, in one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__
