#!/usr/bin/env bash
# deploy/check.sh BASE_IMAGE [STAGE...]: the stack from nothing to a clean end, on this machine. Exit code 0: all of it
# worked. Not in CI. Needs Docker, compose and `make setup`; a quarter of an hour the first time. Stages, in this order:
#
#   build   the images on BASE_IMAGE, their sizes, how much of them torch is
#   run     first and second start, answers and traces, nobody is root or writes where he should not, memory; a container
#           of each kind is killed and restarted under 16 resumable streams; two engines, one stopped; the end in order
#   tls     two of each behind TLS and a password; who has no certificate is not let in
#   bad     what cannot start says why, and restarts ever more seldom, while the others wait
#
# Redis is Debian's and Jaeger a small receiver (deploy/check), so that nothing is pulled.
#
#   COMPOSE              docker-compose or "docker compose"
#   TORCH_INDEX          where the CPU build of torch is; set and empty: wherever pip looks anyway
#   BUILD_NETWORK        network of the builds (host)
#   CHECK_MODEL_NETWORK  network of the container that fetches the model (host)
set -euo pipefail
cd "$(dirname "$0")"
[ $# -ge 1 ] || { echo "usage: deploy/check.sh BASE_IMAGE [build|run|tls|bad]..." >&2; exit 2; }
base=$1
shift
[ $# -gt 0 ] || set -- build run tls bad
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
HEADRACE_SECRETS=$(mktemp -d)
export HEADRACE_SECRETS
gateway=localhost:$HEADRACE_PUBLISH_PORT gateway_2=localhost:$HEADRACE_PUBLISH_PORT_2
traces=http://127.0.0.1:$JAEGER_PUBLISH_PORT

say() { printf '\n== %s\n' "$*"; }
wrong() { echo "WRONG: $*" >&2; exit 1; }
stack() { # OVERLAY... -- COMMAND...: compose with these overlays
  local files=(-f compose.yaml)
  while [ "$1" != -- ]; do files+=(-f "compose.$1.yaml"); shift; done
  shift
  $COMPOSE "${files[@]}" -f check/compose.yaml "$@"
}
everything=(scale secrets tls scale.secrets scale.tls)
container() { stack scale -- ps -q "$1"; }
state() { docker inspect -f "{{.$2}}" "$1"; } # CONTAINER FIELD
ask() { "$python" check/drive.py ask "$@" "$traces"; }
within() { # SECONDS WHAT COMMAND...: waits until the command succeeds
  local limit=$1 what=$2
  shift 2
  for _ in $(seq "$limit"); do
    if "$@"; then return 0; fi
    sleep 1
  done
  wrong "$what: not within $limit s"
}
healthy() { [ "$(state "$(container "$1")" State.Health.Status)" = healthy ]; }
says() { # CONTAINER WORDS: the first line of its log with them; fails where there is none
  docker logs "$1" 2>&1 | WORDS=$2 awk '!found && index($0, ENVIRON["WORDS"]) { print substr($0, 1, 300); found = 1 } END { exit !found }'
}
ended() {
  local code=$?
  [ $code -eq 0 ] || { say "logs of what failed"; stack scale -- logs --tail 15 2>&1 | tail -80; }
  docker ps -aq --filter label=headrace-check | xargs -r docker rm -f >/dev/null
  stack "${everything[@]}" -- down -v --remove-orphans >/dev/null 2>&1 || true
  rm -rf "$HEADRACE_SECRETS"
  exit $code
}
trap ended EXIT

for stage in "$@"; do
  # shellcheck source=/dev/null
  source "check/$stage.sh"
done
say "all of it worked"
