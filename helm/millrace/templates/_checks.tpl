{{/* Combinations that cannot work, each with a message that names the values. Included by every workload. */}}

{{- define "millrace.bytes" -}}
{{- $text := toString . -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "k" 1000 "M" 1000000 "G" 1000000000 "T"
  1000000000000 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- mulf (regexFind "^[0-9.]+" $text | float64) (ternary 1 (index $units $unit) (eq $unit "")) | int64 -}}
{{- end -}}

{{- define "millrace.checkGrace" -}}
{{- $least := add (int .values.drain.preStop) (int .values.drain.timeout) 15 -}}
{{- if lt (int .values.terminationGracePeriodSeconds) (int $least) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds: %d is too short: drain.preStop %d + drain.timeout %d + 15 = %d"
  .name (int .values.terminationGracePeriodSeconds) (int .values.drain.preStop) (int .values.drain.timeout) $least) -}}
{{- end -}}
{{- end -}}

{{- define "millrace.checkScaling" -}}
{{- $scaling := .values.autoscaling -}}
{{- if ne $scaling.kind "none" -}}
{{- if not (kindIs "invalid" .values.replicas) -}}
{{- fail (printf "%s.replicas: must be null with autoscaling.kind=%s, which owns the number" .name $scaling.kind) -}}
{{- end -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- fail (printf "%s.autoscaling: minReplicas %d is above maxReplicas %d" .name (int $scaling.minReplicas) (int
  $scaling.maxReplicas)) -}}
{{- end -}}
{{- else if kindIs "invalid" .values.replicas -}}
{{- fail (printf "%s.replicas: required without autoscaling" .name) -}}
{{- end -}}
{{- end -}}

{{- define "millrace.checkPool" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $at := printf "workers.%s" $pool.name -}}
{{- $ranks := mul (int $pool.dp) (int $pool.tp) -}}
{{- $gpus := mul (int $pool.size) (int $pool.gpus) -}}
{{- $timeouts := default dict $pool.config.timeouts -}}
{{- $needed := add (default 600.0 $timeouts.start | int) (default 120.0 $timeouts.warmup | int) -}}
{{- if not (has $pool.role (list "prefill" "decode" "unified")) -}}
{{- fail (printf "%s.role: required, because %q is none of prefill, decode and unified" $at $pool.name) -}}
{{- end -}}
{{- if gt (len $pool.fullname) 52 -}}
{{- fail (printf "%s: the name %s has more than 52 characters" $at $pool.fullname) -}}
{{- end -}}
{{- if and (gt (int $pool.size) 1) (ne $pool.kind "lws") -}}
{{- fail (printf "%s.size: %d pods of one worker need kind=lws, not %s" $at (int $pool.size) $pool.kind) -}}
{{- end -}}
{{- if and (gt $gpus 0) (ne $gpus $ranks) -}}
{{- fail (printf "%s: size %d x gpus %d = %d GPUs, but dp %d x tp %d = %d ranks" $at (int $pool.size) (int $pool.gpus)
  $gpus (int $pool.dp) (int $pool.tp) $ranks) -}}
{{- end -}}
{{- if mod $ranks (int $pool.size) -}}
{{- fail (printf "%s: dp %d x tp %d = %d ranks cannot be spread evenly over size %d pods" $at (int $pool.dp) (int
  $pool.tp) $ranks (int $pool.size)) -}}
{{- end -}}
{{- $parts := default dict $pool.config | dig "expert_tp" false -}}
{{- if and $parts (gt (int $pool.dp) 1) -}}
{{- fail (printf "%s.config.expert_tp: needs dp 1, not %d" $at (int $pool.dp)) -}}
{{- end -}}
{{- with int $root.Values.model.routedExperts -}}
{{- if and (not $parts) (mod . $ranks) -}}
{{- fail (printf "%s: model.routedExperts %d cannot be divided by dp %d x tp %d = %d ranks" $at . (int $pool.dp) (int
  $pool.tp) $ranks) -}}
{{- end -}}
{{- end -}}
{{- with $pool.resources.limits -}}
{{- if .memory -}}
{{- if ge (include "millrace.bytes" $pool.shm | int64) (include "millrace.bytes" .memory | int64) -}}
{{- fail (printf "%s.shm: %s is not below resources.limits.memory %s, which it counts towards" $at $pool.shm (toString
  .memory)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if lt (int $pool.startup) (int $needed) -}}
{{- fail (printf
  "%s.startup: %d s is shorter than config.timeouts.start + warmup = %d s, so slow starts would be killed" $at (int
  $pool.startup) $needed) -}}
{{- end -}}
{{- if and (gt (int $pool.gpus) 0) (not $root.Values.fabric.preset) (or (ne $pool.role "unified") (gt (int $pool.size)
  1)) -}}
{{- fail (printf "fabric.preset: required, %s moves data between GPU pods" $at) -}}
{{- end -}}
{{- if and $pool.topologyKey (ne $pool.kind "lws") -}}
{{- fail (printf "%s.topologyKey: only with kind=lws" $at) -}}
{{- end -}}
{{- include "millrace.checkGrace" (dict "name" $at "values" $pool) -}}
{{- include "millrace.checkScaling" (dict "name" $at "values" $pool) -}}
{{- end -}}

{{- define "millrace.checkPairs" -}}
{{- $pools := include "millrace.pools" . | fromJson -}}
{{- $roles := dict -}}
{{- range $pools -}}{{- $_ := set $roles .role . -}}{{- end -}}
{{- if not $pools -}}
{{- fail "workers: empty; start from a preset, such as -f presets/cpu-tiny.yaml" -}}
{{- end -}}
{{- if ne (hasKey $roles "prefill") (hasKey $roles "decode") -}}
{{- fail "workers: prefill and decode pools need each other; a single pool has role=unified" -}}
{{- end -}}
{{- if hasKey $roles "prefill" -}}
{{- range $key := list "kv_dtype" "dtype" "limits.page_size" "limits.canary" -}}
{{- $seen := dict -}}
{{- range $pools -}}
{{- if ne .role "unified" -}}
{{- $path := splitList "." $key -}}
{{- $section := ternary .config (default dict .config.limits) (eq (len $path) 1) -}}
{{- $_ := set $seen (toString (index $section (last $path))) .name -}}
{{- end -}}
{{- end -}}
{{- if gt (len $seen) 1 -}}
{{- fail (printf "workers: config.%s differs between %s, which then never pair" $key (values $seen | sortAlpha | join
  " and ")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "millrace.checkModel" -}}
{{- $model := .Values.model -}}
{{- if and (has $model.source (list "pvc" "hf" "s3" "oci")) (not $model.claim) -}}
{{- fail (printf "model.claim: required with model.source=%s" $model.source) -}}
{{- end -}}
{{- if and (has $model.source (list "hf" "s3" "oci")) (or (not $model.uri) (not $model.path)) -}}
{{- fail (printf "model.uri, model.path: required with model.source=%s" $model.source) -}}
{{- end -}}
{{- if and (eq $model.source "hostPath") (not $model.hostPath) -}}
{{- fail "model.hostPath: required with model.source=hostPath" -}}
{{- end -}}
{{- if and (eq $model.source "image") (not $model.path) -}}
{{- fail "model.path: required with model.source=image" -}}
{{- end -}}
{{- $cache := .Values.cache -}}
{{- if and (eq $cache.kind "pvc") (not $cache.claim) -}}
{{- fail "cache.claim: required with cache.kind=pvc" -}}
{{- end -}}
{{- if and (eq $cache.kind "hostPath") (not $cache.hostPath) -}}
{{- fail "cache.hostPath: required with cache.kind=hostPath" -}}
{{- end -}}
{{- end -}}

{{- define "millrace.checks" -}}
{{- include "millrace.checkPairs" . -}}
{{- include "millrace.checkModel" . -}}
{{- include "millrace.checkGrace" (dict "name" "router" "values" .Values.router) -}}
{{- include "millrace.checkScaling" (dict "name" "router" "values" .Values.router) -}}
{{- range include "millrace.pools" . | fromJson -}}
{{- include "millrace.checkPool" (dict "root" $ "pool" .) -}}
{{- end -}}
{{- $fabric := .Values.fabric -}}
{{- if and (eq $fabric.preset "tcp-dev") (not $fabric.allowTcp) -}}
{{- fail "fabric.allowTcp: must be true with fabric.preset=tcp-dev" -}}
{{- end -}}
{{- if and $fabric.privileged (not $fabric.acknowledgePrivileged) -}}
{{- fail "fabric.acknowledgePrivileged: must be true with fabric.privileged: such a pod owns its node" -}}
{{- end -}}
{{- if and (eq .Values.tls.mode "secrets") (or (not .Values.tls.routerSecret) (not .Values.tls.workerSecret)) -}}
{{- fail "tls.routerSecret, tls.workerSecret: required with tls.mode=secrets" -}}
{{- end -}}
{{- if and .Values.tls.publicSecret (eq .Values.tls.mode "off") -}}
{{- fail "tls.publicSecret: needs tls.mode certManager or secrets" -}}
{{- end -}}
{{- if and .Values.gateway.inferencePool.enabled (not .Values.gateway.inferencePool.endpointPicker.name) -}}
{{- fail "gateway.inferencePool.endpointPicker.name: required, an InferencePool always has one" -}}
{{- end -}}
{{- if and .Values.gateway.httpRoute.enabled (not .Values.gateway.httpRoute.parentRefs) -}}
{{- fail "gateway.httpRoute.parentRefs: required, the route belongs to a Gateway" -}}
{{- end -}}
{{- if and .Values.apiKeys.secretName (not .Values.test.apiKey.secretName) -}}
{{- fail "test.apiKey.secretName: required with apiKeys, or helm test is refused" -}}
{{- end -}}
{{- end -}}
