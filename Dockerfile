# One image per platform: docker build --build-arg EXTRA=cuda13 -t sparsejax:cuda13 .   (EXTRA: none, cuda13, gpu, tpu)
# docker run -p 127.0.0.1:8000:8000 -v sparsejax-cache:/cache sparsejax:cuda13 Qwen/Qwen3-0.6B
# The volume keeps models and compiled programs: the second start takes seconds.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /wheels .

FROM python:${PYTHON}-slim
ARG EXTRA=none
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    wheel=$(echo /wheels/*.whl) && \
    if [ "$EXTRA" = none ]; then pip install --no-cache-dir "$wheel[fast]"; \
    else pip install --no-cache-dir "$wheel[fast,$EXTRA]"; fi && \
    useradd --create-home --uid 1000 sparsejax && install -d -o sparsejax -g sparsejax /cache
USER sparsejax
WORKDIR /home/sparsejax
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=15m --interval=30s CMD ["python", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["python", "-m", "sparsejax.serve", "--host", "0.0.0.0"]
