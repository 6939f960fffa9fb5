# One file, two images:
#
#   docker build --target api -t batchq-api .          redis-py, msgpack, FastAPI; no torch
#   docker build --target worker -t batchq-worker .    with torch
#
# On x86-64 a plain torch brings its CUDA libraries, several GB: what a GPU host needs (run the container with --gpus all, or
# the compose file's commented lines). For a CPU host, hand pip the options that select a CPU build: --build-arg PIP_FLAGS="..."
FROM python:3.12-slim AS base
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --system --uid 10001 --no-create-home --home-dir /nonexistent batchq
WORKDIR /src

FROM base AS api
COPY pyproject.toml README.md LICENSE ./
COPY batchq batchq
COPY workers workers
COPY cli cli
RUN pip install . "fastapi>=0.115" "uvicorn>=0.30"
WORKDIR /app
COPY examples/fastapi/app.py ./
USER 10001
EXPOSE 8000
CMD ["uvicorn", "app:app", "--host", "0.0.0.0", "--port", "8000"]

FROM base AS worker
ARG PIP_FLAGS=""
# before the source, so that a change there does not fetch torch again
RUN pip install ${PIP_FLAGS} "torch>=2.4" "numpy>=1.26"
COPY pyproject.toml README.md LICENSE ./
COPY batchq batchq
COPY workers workers
COPY cli cli
RUN pip install ".[torch]"
WORKDIR /app
COPY examples/fastapi/mymodel.py ./
USER 10001
STOPSIGNAL SIGTERM
CMD ["batchq", "worker", "--model", "mymodel:load"]
