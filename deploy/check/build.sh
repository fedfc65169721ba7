# A stage of deploy/check.sh: the compose files, and the images.

say "every combination of compose files"
overlays=(scale observability gpu secrets tls)
for number in $(seq 0 $((2 ** ${#overlays[@]} - 1))); do
  chosen=()
  for i in "${!overlays[@]}"; do
    if (((number >> i) & 1)); then chosen+=("${overlays[i]}"); fi
  done
  for first in "${chosen[@]}"; do
    for second in "${chosen[@]}"; do
      if [ -e "compose.$first.$second.yaml" ]; then chosen+=("$first.$second"); fi
    done
  done
  GRAFANA_PASSWORD=chosen stack "${chosen[@]}" -- config -q || wrong "compose does not take: ${chosen[*]}"
done
echo "$((number + 1)) combinations are valid"

say "images on $base"
for target in gateway tokenizer stream engine model; do
  docker build -q --network "$network" -f Dockerfile --target "$target" --build-arg "BASE=$base" \
    ${TORCH_INDEX+--build-arg "TORCH_INDEX=$TORCH_INDEX"} -t "headrace/$target:$HEADRACE_TAG" .. >/dev/null
done
docker build -q --network "$network" --build-arg "BASE=$base" --target redis -t "$REDIS_IMAGE" check >/dev/null
docker build -q --network "$network" --build-arg "BASE=$base" --build-arg "GATEWAY=headrace/gateway:$HEADRACE_TAG" \
  --target receiver -t "$JAEGER_IMAGE" check >/dev/null
echo "base $(($(docker image inspect -f '{{.Size}}' "$base") / 1000000)) MB"
for target in gateway tokenizer stream engine model; do
  bytes=$(docker image inspect -f '{{.Size}}' "headrace/$target:$HEADRACE_TAG")
  echo "$target $((bytes / 1000000)) MB"
  [ "$bytes" -lt 1500000000 ] || wrong "the image of $target is over 1.5 GB"
done
in_engine() { docker run --rm --entrypoint sh "headrace/engine:$HEADRACE_TAG" -c "$1"; }
echo "torch: $(in_engine 'du -sm /opt/headrace/lib/python3*/site-packages/torch' | cut -f1) MiB of the engine and the model"
[ -z "$(in_engine 'command -v cc gcc g++ c++ clang')" ] || wrong "the engine's image holds a compiler"
