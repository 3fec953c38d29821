#!/bin/sh
# start.sh run MODULE ARGUMENT...   a worker, or its part in a group: the leader runs Ray's head and the worker,
#                                   the other pods run Ray only, for the leader's ranks
# start.sh linger                   preStop of the other pods: until the leader has drained and its Ray is gone
set -eu

alive() { # is the leader's Ray there?
    python3 -c 'import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).close()' "$1" "$2" \
        2>/dev/null
}

run() {
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
            until alive "$LWS_LEADER_ADDRESS" "$RAY_PORT"; do
                echo "waiting for the leader's Ray at $LWS_LEADER_ADDRESS:$RAY_PORT"
                sleep 2
            done
            exec ray start --address="$LWS_LEADER_ADDRESS:$RAY_PORT" --block $RAY_FLAGS
        fi
    fi
    exec python3 -m "$module" "$@"
}

linger() {
    while alive "$LWS_LEADER_ADDRESS" "$RAY_PORT"; do sleep 1; done
}

"$@"
