"""An API in front of a batchq queue: ``uvicorn app:app``.

The model runs in other processes, on this machine or others: ``batchq worker --model mymodel:load``.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from batchq import AsyncClient, BatchqError


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, AsyncClient]]:
    async with (
        AsyncClient() as queue
    ):  # BATCHQ_REDIS_URL and BATCHQ_QUEUE say where; it connects on first use
        yield {"queue": queue}


app = FastAPI(title="sentiment", lifespan=lifespan)


class Text(BaseModel):
    text: str


@app.post("/predict")
async def predict(body: Text, request: Request) -> Any:
    return await request.state.queue.predict(body.text, timeout=2.0)


@app.get("/healthz")
async def healthz(request: Request) -> dict[str, float]:
    return {"redis_seconds": await request.state.queue.ping()}


@app.exception_handler(BatchqError)
async def on_error(request: Request, error: BatchqError) -> JSONResponse:
    body = {"error": error.code, "message": error.message, "request_id": error.request_id}
    return JSONResponse(body, status_code=error.http_status, headers=error.headers)
