#!/bin/sh
# start.sh run MODULE ARGUMENT...   a worker, or its part in a group: the leader runs Ray's head and the worker,
#                                   the other pods run Ray only, for the leader's ranks
# start.sh linger                   preStop of the other pods: until the leader has drained and its Ray is gone
set -eu
ulimit -c 0 # a core dump would have prompts and keys, also of the processes of Ray
trap "exit 143" TERM # the kernel drops signals without a handler for PID 1; the command at hand ends first
compiled=${MILLRACE_COMPILED:-/opt/millrace/cache} # into the image, by services/compile-into-image.sh
leader=${MILLRACE_RUN:?}/leader # the file with its address: its name is gone from DNS as soon as it terminates
REFUSED=3 UNKNOWN=4 SILENCE=20

ask() { # HOST: is Ray there? Prints its address; else REFUSED, or UNKNOWN and why
    python3 -c '
import socket, sys
host, port, refused, unknown = sys.argv[1], *map(int, sys.argv[2:])
try:
    with socket.create_connection((host, port), 2) as peer:
        print(peer.getpeername()[0])
except ConnectionRefusedError:
    sys.exit(refused)
except OSError as error:
    print(f"{host}:{port}: {error}", file=sys.stderr)
    sys.exit(unknown)
' "$1" "$RAY_PORT" "$REFUSED" "$UNKNOWN"
}

seed() { # a new cache begins with what the image has. Pods may share the volume, so the folder appears whole
    [ -d "$compiled" ] && [ ! -e "$MILLRACE_CACHE" ] || return 0
    part=$MILLRACE_CACHE.$POD_NAME
    rm -rf "$part" # of a container that was killed
    cp -Rp "$compiled" "$part" && mv -T "$part" "$MILLRACE_CACHE" || rm -rf "$part" # then the worker compiles
}

run() {
    seed
    find /dev/shm -mindepth 1 -delete 2>/dev/null || true # what a container before this one has left
    if [ -f "$MILLRACE_RUN/fabric.env" ]; then
        set -a && . "$MILLRACE_RUN/fabric.env" && set +a
    fi
    module=$1
    shift
    if [ -n "${RAY_PORT:-}" ]; then
        # shellcheck disable=SC2086 # flags are words
        if [ "$LWS_WORKER_INDEX" = 0 ]; then
            ray start --head --port="$RAY_PORT" --include-dashboard=false $RAY_FLAGS
        else
            join
            exec ray start --address="$address:$RAY_PORT" --block $RAY_FLAGS
        fi
    fi
    exec python3 -m "$module" "$@"
}

join() { # wait for the leader's Ray, and keep its address
    rm -f "$leader"
    until address=$(ask "$LWS_LEADER_ADDRESS"); do
        code=$?
        [ "$code" = "$REFUSED" ] || [ "$code" = "$UNKNOWN" ] || exit "$code"
        echo "waiting for the leader's Ray at $LWS_LEADER_ADDRESS:$RAY_PORT"
        sleep 2
    done
    echo "$address" >"$leader"
    case $address in *:*) address="[$address]" ;; esac
}

linger() {
    [ -f "$leader" ] || return 0 # it has not joined
    address=$(cat "$leader")
    silent=0 # times in a row that nobody could be asked: up to a minute, as long as Ray itself waits for a leader
    while [ "$silent" -lt "$SILENCE" ]; do
        if ask "$address" >/dev/null; then
            silent=0
        elif [ $? = "$UNKNOWN" ]; then
            silent=$((silent + 1))
        else
            return 0
        fi
        sleep 1
    done
}

"$@"
