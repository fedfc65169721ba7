# A stage of deploy/check.sh: the stack as it is meant to run.

say "first start: the model is fetched"
SECONDS=0
stack -- up -d
echo "up after $SECONDS s"
ask "$gateway"
echo "first answer after $SECONDS s"
stack -- logs --no-color model | sed 's/^[^|]*| *//' | tail -4
stack -- stop
stack -- rm -f >/dev/null

say "second start: offline"
SECONDS=0
CHECK_MODEL_NETWORK=none stack -- up -d
ask "$gateway"
echo "first answer after $SECONDS s"
if grep -qw avx512f /proc/cpuinfo; then # the library as the process has mapped it
  docker exec "$(container engine)" grep -m 1 -o '/app/.*headrace_native.so' /proc/1/maps ||
    wrong "the engine does not use the extension that its image brings"
fi

say "nobody is root, nothing can be written but what is mounted for it"
for service in gateway tokenizer stream engine redis jaeger; do
  seen=$(docker exec "$(container $service)" sh -c '
    [ "$(id -u)" != 0 ] || echo "is root"
    grep CapEff /proc/self/status | grep -qw 0000000000000000 || echo "has capabilities"
    find / \( -path /proc -o -path /sys -o -path /tmp -o -path /dev/shm -o -path /dev/mqueue -o -path /data \) -prune \
      -o -type d -print 2>/dev/null | {
        tried=0
        while read -r place; do
          tried=$((tried + 1))
          if { true > "$place/.x"; } 2>/dev/null; then echo "wrote to $place"; fi
        done
        echo "$tried folders tried"
      }')
  [ "$(echo "$seen" | wc -l)" = 1 ] || wrong "$service: $seen"
  echo "$service: no root, no capability, $seen"
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
stack scale -- up -d
ask "$gateway"
ask "$gateway_2"
echo "scaled after $SECONDS s"
within 120 "engine-2 is healthy" healthy engine-2
"$python" check/drive.py strike "$gateway_2" "$(container engine-2)" stop
docker stop "$(container engine-2)" >/dev/null # most likely while it is still being imported
[ "$(state "$(container engine-2)" State.ExitCode)" = 0 ] || wrong "a start that was stopped"
ask "$gateway"
ask "$gateway_2"
docker stats --no-stream --format '{{.Name}} {{.MemUsage}}'

say "down, in order"
SECONDS=0
stack scale -- stop
for service in gateway gateway-2 tokenizer stream engine engine-2; do
  code=$(state "$(container $service)" State.ExitCode)
  [ "$code" = 0 ] || wrong "$service ended with $code"
done
echo "stopped after $SECONDS s, each with exit code 0"
stack scale -- down
