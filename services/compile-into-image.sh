#!/bin/sh
# compile-into-image.sh ENGINE IMAGE DIR   docker or podman; DIR has config.json and tokenizer.json of your model
#
# Compiles on this machine's GPUs what workers of the presets compile, and builds the image again with it. A pod whose
# cache is new begins with it (helm/millrace/files/start.sh). Each worker needs as many GPUs as in its preset.
set -eu
engine=$1 image=$2 model=$(realpath "$3")
case $engine in podman) gpus="--device nvidia.com/gpu=all" ;; *) gpus="--gpus all" ;; esac
here=$(dirname "$0")
cache=${COMPILED:-$here/../build/compiled}
mkdir -p "$cache"
cache=$(realpath "$cache")
folder=/var/cache/millrace/${image##*:} # as in a pod: compiled files name their own paths

compile() { # SETTING... of a worker
    settings="--set device=cuda --set cache_dir=$folder"
    for setting; do settings="$settings --set $setting"; done
    # shellcheck disable=SC2086 # options are words
    "$engine" run --rm --user 0 $gpus --shm-size 16g --volume "$model:/model:ro" --volume "$cache:$folder" "$image" \
        millrace compile --model /model --random-weights $settings
}

compile dp=8 goal=balanced
compile dp=8 goal=throughput
compile tp=8 goal=latency
"$engine" build --build-arg "IMAGE=$image" --file "$here/cached.Dockerfile" --tag "$image" "$cache"
