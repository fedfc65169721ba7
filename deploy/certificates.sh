#!/usr/bin/env bash
# deploy/certificates.sh DIRECTORY: an authority of one's own and a certificate for each process, for compose.tls.yaml.
#
# What is there of the authority is kept, the certificates are made anew: run it again before they run out, then start
# again what shows them to others. `public` is what callers of the gateway see; replace it by one of an authority that
# they trust. Whoever has ca.key can be any process: it is mounted nowhere and belongs elsewhere. Keys can be read by
# containers, which have users of their own; on this machine the directory is closed to all but its owner.
#
#   DAYS               how long certificates are valid (90)
#   HEADRACE_TLS_NAME  a further name of the gateway for its callers
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: deploy/certificates.sh DIRECTORY" >&2; exit 2; }
mkdir -p "$1"
chmod 700 "$1"
cd "$1"

new=(openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)
if [ ! -e ca.key ]; then
  (umask 077 && "${new[@]}" -x509 -days 3650 -subj "/CN=Headrace authority" -keyout ca.key -out ca.crt 2>/dev/null)
  chmod 644 ca.crt
fi

issue() { # NAME HOST...: a certificate for these hosts, to be shown by servers and by callers
  local name=$1 hosts kind
  shift
  hosts=$(printf ',DNS:%s' "$@")
  "${new[@]}" -subj "/CN=$name" -keyout "$name.key.new" -out "$name.csr" 2>/dev/null
  openssl x509 -req -in "$name.csr" -CA ca.crt -CAkey ca.key -days "${DAYS:-90}" -out "$name.crt.new" -extfile <(
    printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n' "${hosts:1}") 2>/dev/null
  for kind in key crt; do # in place: a container that has mounted the file sees what is written into it, no other file
    cat "$name.$kind.new" >"$name.$kind"
    chmod 644 "$name.$kind"
  done
  rm "$name.csr" "$name.key.new" "$name.crt.new"
}

issue public localhost gateway gateway-2 ${HEADRACE_TLS_NAME:+"$HEADRACE_TLS_NAME"}
issue gateway gateway gateway-2 localhost
issue engine engine engine-2 localhost
for name in tokenizer stream redis jaeger collector; do
  issue "$name" "$name" localhost
done
