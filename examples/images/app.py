"""An API for pictures: ``uvicorn app:app``. It decodes nothing, needs neither torch nor Pillow; see classifier.py for the worker's side."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from batchq import AsyncClient, BatchqError, ModelError

MAX_BYTES = 10_000_000


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, AsyncClient]]:
    async with AsyncClient() as queue:  # BATCHQ_REDIS_URL and BATCHQ_QUEUE say where
        yield {"queue": queue}


app = FastAPI(title="images", lifespan=lifespan)


@app.post("/classify")
async def classify(request: Request) -> Any:
    file = bytearray()
    async for part in request.stream():
        file += part
        if len(file) > MAX_BYTES:
            raise HTTPException(413, f"a picture may have {MAX_BYTES:,} bytes")
    return await request.state.queue.predict(bytes(file), timeout=5.0)


@app.exception_handler(BatchqError)
async def on_error(request: Request, error: BatchqError) -> JSONResponse:
    status = error.http_status
    if isinstance(error, ModelError) and error.error_type == "BadImageError":
        status = 400  # the picture's fault, not the model's
    body = {"error": error.code, "message": error.message, "request_id": error.request_id}
    return JSONResponse(body, status_code=status, headers=error.headers)
