{{/* Worker pools, and the checkpoint that each of them serves. */}}

{{/* All pools by name, as JSON: {"prefill": {...}}. A pool is workerDefaults, overridden by workers.NAME, and:
     name, role, fullname, service (the name of its Service), image (see millrace.image), model (whole), modelPath, grace.
     A pool that is null is none, so that a file of values can take one away. Without any, those of presets/cpu-tiny.yaml
     are taken: they are not defaults in values.yaml, where a preset would be merged with them. */}}
{{- define "millrace.pools" -}}
{{- $given := dict -}}
{{- range $name, $own := .Values.workers -}}
{{- if not (kindIs "invalid" $own) -}}{{- $_ := set $given $name $own -}}{{- end -}}
{{- end -}}
{{- if not .Values.workers -}}
{{- $given = (.Files.Get "presets/cpu-tiny.yaml" | fromYaml).workers -}}
{{- end -}}
{{- $pools := dict -}}
{{- range $name, $own := $given -}}
{{- $pool := include "millrace.override" (dict "base" $.Values.workerDefaults "own" $own) | fromJson -}}
{{- $_ := set $pool "env" (include "millrace.variables" (list $.Values.workerDefaults.env $own.env) | fromJson) -}}
{{- $_ := set $pool "name" $name -}}
{{- $_ := set $pool "config" (default dict $pool.config) -}}
{{- $_ := set $pool "revision" (default "" $pool.revision) -}}
{{- $_ := set $pool "role" (default $name $pool.role) -}}
{{- $_ := set $pool "fullname" (printf "%s-%s" (include "millrace.fullname" $) $name) -}}
{{- /* LeaderWorkerSet makes a Service of its own name, with addresses of leaders that are not ready; not if one is there */ -}}
{{- $_ := set $pool "service" (ternary (print $pool.fullname "-leaders") $pool.fullname (eq $pool.kind "lws")) -}}
{{- $which := ternary "gpuWorker" "worker" (gt (int $pool.gpus) 0) -}}
{{- $_ := set $pool "image" (include "millrace.image" (dict "root" $ "which" $which "own" $pool.image) | fromJson) -}}
{{- $_ := set $pool "model" (mustMergeOverwrite (deepCopy $.Values.model) (default dict $pool.model)) -}}
{{- $_ := set $pool "modelPath" (include "millrace.modelPath" $pool.model) -}}
{{- $_ := set $pool "grace" (include "millrace.grace" $pool | int) -}}
{{- if $pool.guaranteed -}}
{{- $amounts := merge (deepCopy (default dict $pool.resources.limits)) (default dict $pool.resources.requests) -}}
{{- $_ := set $pool "resources" (dict "requests" $amounts "limits" $amounts) -}}
{{- end -}}
{{- $_ := set $pool "diskFolder" (get (default dict $pool.config.limits) "disk_cache" | default "") -}}
{{- $_ := set $pools $name $pool -}}
{{- end -}}
{{- $pools | toJson -}}
{{- end -}}

{{/* (dict "base" {...} "own" {...}) -> base, overridden by own, as JSON. Maps are merged and everything else is replaced:
     mustMergeOverwrite keeps a list where own has an empty one. */}}
{{- define "millrace.override" -}}
{{- $made := deepCopy .base -}}
{{- range $key, $value := .own -}}
{{- $there := get $made $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $there) -}}
{{- $value = include "millrace.override" (dict "base" $there "own" $value) | fromJson -}}
{{- end -}}
{{- $_ := set $made $key $value -}}
{{- end -}}
{{- toJson $made -}}
{{- end -}}

{{/* Values of `env`, the last one wins -> one, as JSON. A valueFrom is replaced: with the parts of two it would be refused. */}}
{{- define "millrace.variables" -}}
{{- $made := dict -}}
{{- range . -}}{{- range $name, $value := . -}}{{- $_ := set $made $name $value -}}{{- end -}}{{- end -}}
{{- toJson $made -}}
{{- end -}}

{{/* pool -> the label by which discovery finds its revision, on pods and (for EndpointSlices, which copy it) on its Service */}}
{{- define "millrace.revision" -}}
{{- with .revision }}
millrace/revision: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Seconds from the beginning of preStop to the end of the last process. A worker also waits for held pages that others
     still read (timeouts.lease); 15 are for ranks, servers and the container to end. */}}
{{- define "millrace.grace" -}}
{{- $lease := 0.0 -}}
{{- if hasKey . "role" -}}{{- $lease = default dict .config.timeouts | dig "lease" 30.0 -}}{{- end -}}
{{- $least := add (int .drain.preStop) (int .drain.timeout) (ceil $lease | int) 15 -}}
{{- ternary $least .terminationGracePeriodSeconds (kindIs "invalid" .terminationGracePeriodSeconds) | int -}}
{{- end -}}

{{/* model -> folder of its checkpoint in a container */}}
{{- define "millrace.modelPath" -}}
{{- if eq .source "image" -}}
{{ .path }}
{{- else -}}
/models{{ if .path }}/{{ trimPrefix "/" .path }}{{ end }}
{{- end -}}
{{- end -}}

{{- define "millrace.downloads" -}}
{{- if has .source (list "hf" "s3" "oci") }}true{{ end -}}
{{- end -}}

{{- define "millrace.modelVolume" -}}
{{- if eq .source "hostPath" }}
- name: model
  hostPath: {path: {{ .hostPath | quote }}, type: Directory}
{{- else if ne .source "image" }}
- name: model
  persistentVolumeClaim: {claimName: {{ .claim | quote }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "millrace.modelMount" -}}
{{- if ne .source "image" }}
- {name: model, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{/* Seconds until a roll-out counts as stuck: routers are ready when a pair of workers is, and workers load for long */}}
{{- define "millrace.progress" -}}
{{- $longest := 0 -}}
{{- range include "millrace.pools" . | fromJson -}}{{- $longest = max $longest (int .startup) -}}{{- end -}}
{{- add $longest 600 -}}
{{- end -}}
