"""An API for embeddings: ``uvicorn app:app``. It needs no torch; see embedder.py for the worker's side."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from batchq import AsyncClient, BatchqError


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, AsyncClient]]:
    async with AsyncClient() as queue:  # BATCHQ_REDIS_URL and BATCHQ_QUEUE say where
        yield {"queue": queue}


app = FastAPI(title="embeddings", lifespan=lifespan)


Text = Annotated[str, Field(max_length=20_000)]  # characters; the model reads 256 tokens


class Body(BaseModel):
    input: Text | Annotated[list[Text], Field(max_length=256)]


@app.post("/embed")
async def embed(body: Body, request: Request) -> Any:
    queue = request.state.queue
    if isinstance(body.input, str):
        return (await queue.predict(body.input, timeout=10.0)).tolist()
    # admitted all or none, one deadline for all; the worker makes batches of texts of like length, here they are in order again
    return [vector.tolist() for vector in await queue.predict_many(body.input, timeout=10.0)]


@app.exception_handler(BatchqError)
async def on_error(request: Request, error: BatchqError) -> JSONResponse:
    body = {"error": error.code, "message": error.message, "request_id": error.request_id}
    return JSONResponse(body, status_code=error.http_status, headers=error.headers)
