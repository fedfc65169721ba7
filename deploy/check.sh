#!/usr/bin/env bash
# deploy/check.sh BASE_IMAGE: the stack from nothing to a clean end, on this machine. Exit code 0: all of it worked.
#
# Builds the images on BASE_IMAGE, brings compose up, asks through the published port, finds the trace, shows that no
# container is root or can write where it should not, kills and restarts a container of each kind under 16 resumable
# streams, scales to two engines, stops one, and takes everything down. Redis is Debian's and Jaeger is a small receiver
# (deploy/check), so that nothing is pulled. Not in CI. Needs Docker, compose and `make setup`; ten minutes the first time.
#
#   COMPOSE              docker-compose or "docker compose"
#   TORCH_INDEX          where the CPU build of torch is; set and empty: wherever pip looks anyway
#   BUILD_NETWORK        network of the builds (host)
#   SKIP_BUILD=1         the images are there already
#   CHECK_MODEL_NETWORK  network of the container that fetches the model (host)
set -euo pipefail
cd "$(dirname "$0")"
[ $# -eq 1 ] || { echo "usage: deploy/check.sh BASE_IMAGE" >&2; exit 2; }
base=$1
network=${BUILD_NETWORK:-host}
python=${PYTHON:-../.venv/bin/python}
if [ -z "${COMPOSE:-}" ]; then
  if docker compose version >/dev/null 2>&1; then COMPOSE="docker compose"; else COMPOSE=docker-compose; fi
fi
export DOCKER_BUILDKIT=1 COMPOSE_PROJECT_NAME=headrace-check HEADRACE_TAG=check
export REDIS_IMAGE=headrace-check/redis JAEGER_IMAGE=headrace-check/receiver
export HEADRACE_PUBLISH_PORT=${HEADRACE_PUBLISH_PORT:-50450} HEADRACE_PUBLISH_PORT_2=${HEADRACE_PUBLISH_PORT_2:-50451}
export JAEGER_PUBLISH_PORT=${JAEGER_PUBLISH_PORT:-50452}
export PYTHONPATH=..
gateway=127.0.0.1:$HEADRACE_PUBLISH_PORT gateway_2=127.0.0.1:$HEADRACE_PUBLISH_PORT_2
traces=http://127.0.0.1:$JAEGER_PUBLISH_PORT

say() { printf '\n== %s\n' "$*"; }
wrong() { echo "WRONG: $*" >&2; exit 1; }
stack() { $COMPOSE -f compose.yaml -f check/compose.yaml "$@"; }
scaled() { $COMPOSE -f compose.yaml -f compose.scale.yaml -f check/compose.yaml "$@"; }
container() { scaled ps -q "$1"; }
ask() { "$python" check/drive.py ask "$@" "$traces"; }
healthy() {
  for _ in $(seq 120); do
    [ "$(docker inspect -f '{{.State.Health.Status}}' "$(container "$1")")" != healthy ] || return 0
    sleep 1
  done
  wrong "$1 is not healthy"
}
ended() {
  local code=$?
  [ $code -eq 0 ] || { say "logs of what failed"; scaled logs --tail 15 2>&1 | tail -80; }
  scaled down -v --remove-orphans >/dev/null 2>&1 || true
  exit $code
}
trap ended EXIT

if [ -z "${SKIP_BUILD:-}" ]; then
  say "images on $base"
  for target in gateway tokenizer stream engine model; do
    docker build -q --network "$network" -f Dockerfile --target "$target" --build-arg "BASE=$base" \
      ${TORCH_INDEX+--build-arg "TORCH_INDEX=$TORCH_INDEX"} -t "headrace/$target:$HEADRACE_TAG" .. >/dev/null
  done
fi
docker build -q --network "$network" --build-arg "BASE=$base" --target redis -t "$REDIS_IMAGE" check >/dev/null
docker build -q --network "$network" --build-arg "BASE=$base" --build-arg "GATEWAY=headrace/gateway:$HEADRACE_TAG" \
  --target receiver -t "$JAEGER_IMAGE" check >/dev/null
for target in gateway tokenizer stream engine model; do
  bytes=$(docker image inspect -f '{{.Size}}' "headrace/$target:$HEADRACE_TAG")
  echo "$target $((bytes / 1000000)) MB"
  [ "$bytes" -lt 1500000000 ] || wrong "the image of $target is over 1.5 GB"
done
echo "torch: $(docker run --rm --entrypoint sh "headrace/engine:$HEADRACE_TAG" -c \
  'du -sm /opt/headrace/lib/python3*/site-packages/torch' | cut -f1) MiB of the engine and the model"

say "first start: the model is fetched"
SECONDS=0
stack up -d
echo "up after $SECONDS s"
ask "$gateway"
echo "first answer after $SECONDS s"
scaled logs --no-color model | sed 's/^[^|]*| *//' | tail -4
stack stop
stack rm -f >/dev/null

say "second start: offline"
SECONDS=0
CHECK_MODEL_NETWORK=none stack up -d
ask "$gateway"
echo "first answer after $SECONDS s"

say "nobody is root, nothing can be written"
for service in gateway tokenizer stream engine redis jaeger; do
  id=$(container $service)
  seen=$(docker exec "$id" sh -c '
    for place in /app /etc /opt /var/lib/headrace /usr/bin; do touch $place/x 2>/dev/null && echo "wrote to $place"; done
    [ "$(id -u)" != 0 ] || echo "is root"
    grep CapEff /proc/self/status | grep -qw 0000000000000000 || echo "has capabilities"')
  [ -z "$seen" ] || wrong "$service: $seen"
  echo "$service: no root, no capability, read-only"
done

say "memory"
docker stats --no-stream --format '{{.Name}} {{.MemUsage}}'

say "each kind is killed and restarted under 16 resumable streams"
for service in gateway stream engine tokenizer redis jaeger; do
  "$python" check/drive.py strike "$gateway" "$(container $service)" kill
  ask "$gateway" >/dev/null || wrong "no answer after $service came back"
done

say "two gateways, two engines"
SECONDS=0
scaled up -d
ask "$gateway"
ask "$gateway_2"
echo "scaled after $SECONDS s"
healthy engine-2
"$python" check/drive.py strike "$gateway_2" "$(container engine-2)" stop
docker stop "$(container engine-2)" >/dev/null # most likely while it is still being imported
[ "$(docker inspect -f '{{.State.ExitCode}}' "$(container engine-2)")" = 0 ] || wrong "a start that was stopped"
ask "$gateway"
ask "$gateway_2"
docker stats --no-stream --format '{{.Name}} {{.MemUsage}}'

say "what cannot start says why, and does not restart in a tight loop"
for bad in "HEADRACE_MODEL=no-such-model" "HEADRACE_CONFIG=/no/such/file" "HEADRACE_ENGINE_PORT=99999"; do
  id=$(docker run -d --restart unless-stopped -e "$bad" "headrace/engine:$HEADRACE_TAG")
  sleep 12
  echo "$bad: $(docker inspect -f '{{.RestartCount}}' "$id") restarts in 12 s: $(docker logs --tail 2 "$id" 2>&1 | head -1 | cut -c1-300)"
  count=$(docker inspect -f '{{.RestartCount}}' "$id")
  docker rm -f "$id" >/dev/null
  [ "$count" -lt 8 ] || wrong "it restarts in a tight loop"
done

say "down, in order"
SECONDS=0
scaled stop
for service in gateway gateway-2 tokenizer stream engine engine-2; do
  code=$(docker inspect -f '{{.State.ExitCode}}' "$(container $service)")
  [ "$code" = 0 ] || wrong "$service ended with $code"
done
echo "stopped after $SECONDS s, each with exit code 0"
scaled down -v
say "all of it worked"
