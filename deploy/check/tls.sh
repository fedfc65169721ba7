# A stage of deploy/check.sh: TLS on every hop, and a password, with two of each.

say "TLS on every hop and a password of Redis, two of each"
./certificates.sh "$HEADRACE_SECRETS"
password=$(openssl rand -hex 16)
echo "requirepass $password" >"$HEADRACE_SECRETS/redis.conf"
printf '[redis]\nurl = "redis://:%s@redis:6379/0"\n' "$password" >"$HEADRACE_SECRETS/headrace.toml"
SECONDS=0
stack "${everything[@]}" -- up -d
export CHECK_CA=$HEADRACE_SECRETS/ca.crt
ask "$gateway"
ask "$gateway_2"
echo "first answers after $SECONDS s"
within 120 "engine-2 is healthy" healthy engine-2
"$python" check/drive.py strike "$gateway" "$(container stream)" kill # it is Redis that the streams are resumed from
unset CHECK_CA

say "who shows no certificate is not let in"
inside() { docker exec "$(container gateway)" python -m services.common.healthcheck "$@" 2>&1; }
for peer in tokenizer:50051 stream:50052 engine:50053 engine-2:50053; do
  if inside "$peer"; then wrong "$peer speaks plain text"; fi
  if inside "$peer" /run/secrets/ca.crt "${peer%:*}"; then wrong "$peer wants no certificate"; fi
done
if docker exec "$(container redis)" redis-cli ping; then wrong "Redis speaks plain text"; fi
if docker exec "$(container redis)" redis-cli --tls --cacert /run/secrets/ca.crt ping; then wrong "Redis wants no certificate"; fi
health() { (cd .. && "${python#../}" -m services.common.healthcheck "$@"); }
if health "$gateway"; then wrong "the gateway speaks plain text"; fi
health "$gateway" "$HEADRACE_SECRETS/ca.crt" localhost || wrong "the gateway's callers need a certificate"
stack "${everything[@]}" -- down
