"""The routes of ``serving.endpoint`` in vLLM's API server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from vllm import envs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    validate_json_request,
    with_cancellation,
)
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

from blockattn_rag.errors import BlockAttnError, GrammarError, MissError, ProtocolError
from blockattn_rag.server.endpoint import CHAT_COMPLETIONS, COMPLETIONS, ENCODE, INFO, EncodeBody
from blockattn_rag.server.vllm.counts import counted
from blockattn_rag.server.vllm.service import Service


def _check_key(raw_request: Request) -> None:
    """Ask for the server's API key, which vLLM asks for on its own routes alone."""
    args = getattr(raw_request.app.state, "args", None)
    keys = [key for key in (getattr(args, "api_key", None) or [envs.VLLM_API_KEY]) if key]
    guard = AuthenticationMiddleware(raw_request.app, keys)
    if keys and not guard.verify_token(raw_request.headers):
        raise HTTPException(401, "Unauthorized")


router = APIRouter(dependencies=[Depends(_check_key)])
_JSON = [Depends(validate_json_request)]


def _service(raw_request: Request) -> Service:
    service: Service = raw_request.app.state.blockattn
    return service


@router.get(INFO)
async def info(raw_request: Request) -> Response:
    """What this server tells of itself."""
    try:
        return JSONResponse(_service(raw_request).info(raw_request.headers).to_dict())
    except BlockAttnError as error:
        return _refusal(error)


@router.post(ENCODE, dependencies=_JSON)
@with_cancellation
async def encode(told: Annotated[Any, Body()], raw_request: Request) -> Response:
    """Have blocks stored."""
    try:
        body = EncodeBody.from_dict(told)
        answer = await _service(raw_request).encode(body, raw_request.headers)
    except BlockAttnError as error:
        return counted(raw_request, _refusal(error))
    return counted(raw_request, JSONResponse(answer.to_dict()))


@router.post(COMPLETIONS, dependencies=_JSON)
@with_cancellation
@load_aware_call
async def completions(request: CompletionRequest, raw_request: Request) -> Response:
    """As ``/v1/completions``, with the blocks that ``kv_transfer_params`` tell of ensured."""
    service = _service(raw_request)
    handler = service.completions
    answer = await _answer(service, handler, "create_completion", request, raw_request)
    return counted(raw_request, answer)


@router.post(CHAT_COMPLETIONS, dependencies=_JSON)
@with_cancellation
@load_aware_call
async def chat_completions(request: ChatCompletionRequest, raw_request: Request) -> Response:
    """As ``/v1/chat/completions``; the prompt is ``kv_transfer_params.prompt_token_ids``."""
    service = _service(raw_request)
    handler = service.chat
    answer = await _answer(service, handler, "create_chat_completion", request, raw_request)
    return counted(raw_request, answer)


async def _answer(
    service: Service, handler: Any, create: str, request: Any, raw_request: Request
) -> Response:
    """vLLM's answer, in the form in which its own routes give it."""
    try:
        answer = await service.complete(handler, create, request, raw_request)
    except BlockAttnError as error:
        return _refusal(error)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if isinstance(answer, AsyncGenerator):
        args = getattr(raw_request.app.state, "args", None)
        interval = float(getattr(args, "sse_keep_alive_interval", 0))
        return StreamingResponse(
            with_sse_keep_alive(answer, interval), media_type="text/event-stream"
        )
    return JSONResponse(answer.model_dump())


def _refusal(error: BlockAttnError) -> Response:
    """Why something was not done, in the form of vLLM's errors.

    400: it cannot be asked so. 409: this server may not do what would be needed. 503: it could not
    be done now.
    """
    statuses = {ProtocolError: 400, GrammarError: 400, MissError: 409}
    status = next((code for kind, code in statuses.items() if isinstance(error, kind)), 503)
    told = {"message": str(error), "type": type(error).__name__, "param": None, "code": status}
    return JSONResponse({"error": told}, status_code=status)
