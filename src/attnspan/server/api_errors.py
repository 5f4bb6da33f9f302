"""Which status a refusal has, and what it says: OpenAI's error object, and never more than that.

| what is raised | status |
|---|---|
| ApiError | its own |
| EngineBusy | 429, with Retry-After |
| EngineClosed | 503, with Retry-After |
| StepFailed | 500 |
| any other AttnspanError | 400: the request cannot be served as asked |
| anything else | 500; the log has it, the client does not |
"""

from __future__ import annotations

import json
import logging
import math
from typing import Any

from starlette.responses import Response

from attnspan.errors import AttnspanError, EngineBusy, EngineClosed, StepFailed

log = logging.getLogger("attnspan.server")

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""The `type` of an error, by status; others are invalid_request_error or server_error."""


class ApiError(Exception):
    """A request that is refused: a status, and the parts of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The object that clients know."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Json(self.body, self.status, self.headers)


class Json(Response):
    """JSON in ASCII, so that any text can be in it."""

    media_type = "application/json"

    def __init__(self, content: object, status_code: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(json.dumps(content, allow_nan=False, separators=(",", ":")), status_code, headers)


def api_error_of(error: BaseException) -> ApiError:
    """What a client is told of an error."""
    match error:
        case ApiError():
            return error
        case EngineBusy():
            wait = {"Retry-After": str(math.ceil(error.retry_after))}
            return ApiError(429, str(error), code="queue_full", headers=wait)
        case EngineClosed():
            return ApiError(503, str(error), code="unavailable", headers={"Retry-After": "10"})
        case StepFailed():
            return ApiError(500, "the request failed in the engine; it may be tried again", code="engine_error")
        case AttnspanError():
            return ApiError(400, str(error))
    log.error("a request has failed", exc_info=error)
    return ApiError(500, "internal error", code="internal_error")
