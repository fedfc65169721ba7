# A stage of deploy/check.sh: what cannot start says why in one line, is not healthy, and restarts ever more seldom; the
# others wait, say so, and go on by themselves once it is mended.

WATCH_S=12
names=() words=()
expect() { names+=("$1") words+=("$2"); } # CONTAINER WORDS
judge() {
  sleep "$WATCH_S" # what is measured: how often they restart meanwhile
  for i in "${!names[@]}"; do
    within 60 "a reason: ${words[i]}" says "${names[i]}" "${words[i]}" >/dev/null
    count=$(state "${names[i]}" RestartCount)
    echo "$(state "${names[i]}" Name | cut -c2-): $count restarts: $(says "${names[i]}" "${words[i]}")"
    [ "$count" -lt 8 ] || wrong "it restarts in a tight loop"
    [ "$(state "${names[i]}" State.Health.Status)" != healthy ] || wrong "its health does not say so"
  done
  names=() words=()
}
alone() { # NAME SERVICE WORDS OPTION...: a container by itself
  local name=$1 service=$2 reason=$3
  shift 3
  docker run -d --label headrace-check --name "headrace-check-$name" --restart unless-stopped --read-only --tmpfs /tmp "$@" \
    "headrace/$service:$HEADRACE_TAG" >/dev/null
  expect "headrace-check-$name" "$reason"
}

fails() { # WORDS COMMAND...: the command fails, and one line of what it says has the words (extended expression)
  local reason=$1 said
  shift
  if said=$("$@" 2>&1); then wrong "it came up: $*"; fi
  grep -m 1 -E "$reason" <<<"$said" || wrong "no word of '$reason': $said"
}

one_by_one() { # OVERLAY SERVICE...: none waits for another to be healthy, as they would in one command
  local overlay=$1 service
  shift
  for service; do stack "$overlay" -- up -d --no-deps "$service"; done
}

say "an empty model volume, a file that is not there, a port that is none"
for service in tokenizer stream engine; do
  alone "empty-$service" "$service" "run \`headrace model import\`"
done
alone config gateway "HEADRACE_CONFIG=/no/such/file: cannot be read" -e HEADRACE_CONFIG=/no/such/file
alone port gateway "HEADRACE_GATEWAY_PORT='99999': expected" -e HEADRACE_GATEWAY_PORT=99999
judge
docker ps -aq --filter label=headrace-check | xargs -r docker rm -f >/dev/null

say "a first start without a network: nothing but the model's container runs"
export CHECK_MODEL_NETWORK=none COMPOSE_PROJECT_NAME=headrace-check-offline
fails "exited with code 1|complete successfully" stack -- up -d
stack -- logs --no-color model | sed 's/^[^|]*| *//' | tail -n 1
[ -z "$(stack -- ps -q gateway)$(stack -- ps -q engine)" ] || wrong "something started without a model"
stack -- down -v >/dev/null 2>&1
unset CHECK_MODEL_NETWORK
export COMPOSE_PROJECT_NAME=headrace-check

say "a port that is taken"
stack -- up -d redis jaeger
coproc taken { "$python" -c 'import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("taken", flush=True)
sys.stdin.read()' "$HEADRACE_PUBLISH_PORT"; }
read -r _ <&"${taken[0]}"
fails "port is already allocated|address already in use" stack -- up -d --no-deps gateway
eval "exec ${taken[1]}>&-"
wait "$taken_PID"
within 60 "the others go on" healthy redis

say "the GPU overlay"
if [ -e /proc/driver/nvidia/version ]; then
  echo "there is a driver here: not shown"
else
  docker tag "headrace/engine:$HEADRACE_TAG" "headrace/engine-cuda:$HEADRACE_TAG"
  fails "could not select device driver" stack gpu -- up -d --no-deps engine
  docker rmi "headrace/engine-cuda:$HEADRACE_TAG" >/dev/null
fi
stack -- down

say "a wrong password of Redis"
stack -- run -T --rm model >/dev/null </dev/null # already there, unless this stage runs alone
echo "requirepass the-password" >"$HEADRACE_SECRETS/redis.conf"
printf '[redis]\nurl = "redis://:%s@redis:6379/0"\n' "another" >"$HEADRACE_SECRETS/headrace.toml"
chmod 644 "$HEADRACE_SECRETS"/*
chmod 711 "$HEADRACE_SECRETS"
one_by_one secrets redis tokenizer engine stream gateway
for service in stream gateway; do
  expect "$(container $service)" "HEADRACE_REDIS_URL: Redis at redis:6379 does not take the password"
done
judge
within 120 "the others serve" healthy engine
printf '[redis]\nurl = "redis://:%s@redis:6379/0"\n' "the-password" >"$HEADRACE_SECRETS/headrace.toml"
within 180 "it goes on with the right one" healthy gateway
stack secrets -- down

say "a certificate that cannot be read, and one that has expired"
./certificates.sh "$HEADRACE_SECRETS"
mkdir "$HEADRACE_SECRETS/old"
cp "$HEADRACE_SECRETS"/ca.* "$HEADRACE_SECRETS/old"
DAYS=-1 ./certificates.sh "$HEADRACE_SECRETS/old"
for kind in crt key; do cp "$HEADRACE_SECRETS/old/stream.$kind" "$HEADRACE_SECRETS/stream.$kind"; done
chmod 600 "$HEADRACE_SECRETS/tokenizer.key"
one_by_one tls redis tokenizer engine stream gateway
expect "$(container tokenizer)" "HEADRACE_TOKENIZER_TLS_KEY=/run/secrets/tokenizer.key: cannot be read (Permission denied)"
expect "$(container stream)" "HEADRACE_STREAM_TLS_CERTIFICATE=/run/secrets/stream.crt: expired at"
judge
within 60 "the gateway says whom it waits for" says "$(container gateway)" '"peer": "tokenizer"'
chmod 644 "$HEADRACE_SECRETS/tokenizer.key"
./certificates.sh "$HEADRACE_SECRETS"
within 180 "it goes on with good ones" healthy gateway
stack tls -- down
