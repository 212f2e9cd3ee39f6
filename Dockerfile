# An image with tfdpfl. docs/install.md says how it is built, also for Flower and for a GPU.
FROM python:3.11 AS wheel
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel /src

FROM python:3.11-slim
ARG EXTRAS=
ARG TENSORFLOW=tensorflow
COPY --from=wheel /wheel /wheel
RUN pip install --no-cache-dir "$(echo /wheel/*.whl)$EXTRAS" "$TENSORFLOW"
# A volume that is mounted there first gets the owner that the folder has here: deployment/compose.yaml needs it.
RUN install -d -m 700 -o 10001 -g 10001 /state && install -d -m 700 -o 10002 -g 10002 /app-state
WORKDIR /work
CMD ["tfdpfl", "demo"]
