"""Every error that a user can meet, as one tree.

    JaxserveError                 500 InternalServerError
    ├── RequestError              400 BadRequestError        (a ValueError: offline callers catch it as one)
    │   ├── Unauthorized          401 AuthenticationError
    │   ├── NotFound              404 NotFoundError
    │   ├── MethodNotAllowed      405 MethodNotAllowedError
    │   ├── RequestTimeout        408 RequestTimeoutError    (its body did not come in time)
    │   ├── PayloadTooLarge       413 PayloadTooLargeError
    │   ├── UnsupportedMediaType  415 UnsupportedMediaTypeError
    │   └── QueueFull             429 RateLimitError         (carries Retry-After)
    ├── RequestAborted            499 RequestAbortedError    (somebody ended it: no failure of the server)
    ├── EngineError               500 InternalServerError    (this request failed, the engine goes on)
    ├── EngineDead                503 ServiceUnavailableError
    ├── EngineAsleep              503 EngineAsleepError      (carries Retry-After)
    ├── DeadlineExceeded          504 TimeoutError
    └── ConfigError               start-up only              (a ValueError)
        └── DoesNotFit                                       (memory: need, have, longest that fits)

Each error knows its HTTP status, its OpenAI error type and the field it speaks of; its message names field,
limit and given value. `ErrorInfo` is the same thing as plain data, to cross a process boundary.
"""

from dataclasses import dataclass

# A message shows a value as its reader writes it: a RequestError in Python says None, the answer over HTTP null. Until
# it is known who reads, a character that repr() never leaves in a text stands for such a word (request.short).
NONE, TRUE, FALSE = "\ue000", "\ue001", "\ue002"
_IN_PYTHON = str.maketrans({NONE: "None", TRUE: "True", FALSE: "False"})
_IN_JSON = str.maketrans({NONE: "null", TRUE: "true", FALSE: "false"})


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as data: what the body of an HTTP error says."""

    message: str
    type: str
    param: str | None
    code: int
    retry_after_s: int | None = None

    def body(self) -> dict:
        """The one error body of every route."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def exception(self) -> "JaxserveError":
        """The exception this was made from."""
        by_status = _BY_STATUS.get(self.code, RequestError if 400 <= self.code < 500 else EngineError)
        cls = EngineAsleep if self.type == EngineAsleep.type else by_status
        error = cls(self.message, param=self.param)
        if 400 <= self.code < 500:
            error.status = self.code  # of another server: 403, 408, ...
        error.retry_after_s = self.retry_after_s
        return error


class JaxserveError(Exception):
    """The server failed.

    Base of all errors raised on purpose. `param` is the field the message speaks of, if any.
    """

    status = 500
    type = "InternalServerError"
    retry_after_s: int | None = None
    _words = _IN_JSON  # of values in the message, which mostly come from files

    def __init__(self, message: str, *, param: str | None = None):
        self.message = message.translate(self._words)
        super().__init__(self.message)
        self.param = param
        self._in_json = message.translate(_IN_JSON)

    def info(self) -> ErrorInfo:
        """As a client is told, in the words of JSON."""
        return ErrorInfo(self._in_json, self.type, self.param, self.status, self.retry_after_s)


class RequestError(JaxserveError, ValueError):
    """The request cannot be served as it was given."""

    _words = _IN_PYTHON
    status = 400
    type = "BadRequestError"


class Unauthorized(RequestError):
    """No valid API key was sent."""

    status = 401
    type = "AuthenticationError"


class NotFound(RequestError):
    """There is no such model, route or thing."""

    status = 404
    type = "NotFoundError"


class MethodNotAllowed(RequestError):
    """The route is there, but not for this method."""

    status = 405
    type = "MethodNotAllowedError"


class RequestTimeout(RequestError):
    """The request's body did not come in time."""

    status = 408
    type = "RequestTimeoutError"


class PayloadTooLarge(RequestError):
    """The body is larger than the server's limit."""

    status = 413
    type = "PayloadTooLargeError"


class UnsupportedMediaType(RequestError):
    """The body is not announced as what the route takes."""

    status = 415
    type = "UnsupportedMediaTypeError"


class QueueFull(RequestError):
    """The waiting queue is at its limit: try again later (Retry-After)."""

    status = 429
    type = "RateLimitError"
    retry_after_s = 1


class RequestAborted(JaxserveError):
    """The request was ended before it had a result: by POST /abort_requests, a pause, a sleep or the server's end."""

    status = 499  # which gRPC's CANCELLED is mapped to; clients do not try again by themselves, as they would a 5xx
    type = "RequestAbortedError"


class EngineError(JaxserveError):
    """This request failed inside the engine; others go on."""


class EngineDead(JaxserveError):
    """The engine has ended, and with it the server will."""

    status = 503
    type = "ServiceUnavailableError"


class EngineAsleep(JaxserveError):
    """The engine was sent to sleep, and takes requests again once it is woken up."""

    status = 503
    type = "EngineAsleepError"
    retry_after_s = 10


class DeadlineExceeded(JaxserveError):
    """The request took longer than the server's time limit."""

    status = 504
    type = "TimeoutError"


class ConfigError(JaxserveError, ValueError):
    """A start-up option cannot be honoured."""


class DoesNotFit(ConfigError):
    """The model or its KV cache does not fit the device: the message says need, have, and what would fit."""


_BY_STATUS = {
    cls.status: cls
    for cls in (
        RequestError,
        Unauthorized,
        NotFound,
        MethodNotAllowed,
        RequestTimeout,
        PayloadTooLarge,
        UnsupportedMediaType,
        QueueFull,
        RequestAborted,
        EngineDead,
        DeadlineExceeded,
    )
}
