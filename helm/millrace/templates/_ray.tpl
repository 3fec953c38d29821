{{/* Ray in the pods of a group: (dict "root" $ "pool" $pool) -> environment variables. */}}

{{/* --node-ip-address: with several NICs Ray may name a node by an address that no peer reaches. The object store holds
     nothing: data of ranks never goes through Ray, which would otherwise take nearly all of /dev/shm. A line of a rank is
     printed by the leader as the rank wrote it: no colours, and none held back because another rank wrote the same. A pod
     has waited for the leader before its SIGTERM (start.sh linger), so Ray has nothing to wait for after it. Every port is
     given: Ray's node ends itself where an agent takes 15 seconds to tell a port that it has chosen (start_hook). A host
     that is cut off is lost after three health checks of 0.8 s, 0.1 s apart; Ray's own defaults need 20 s and more. */}}
{{- define "millrace.rayEnv" -}}
{{- $ports := .root.Values.ray.ports -}}
{{- $ranks := div (mul (int .pool.dp) (int .pool.tp)) (int .pool.size) -}}
- {name: RAY_PORT, value: "{{ int $ports.gcs }}"}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "millrace.raySecret" .root | quote }}, key: {{ .root.Values.ray.auth.key | quote }}}}
- {name: RAY_START_HOOK, value: millrace_serve.worker.ray_launch.start_hook}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_DEDUP_LOGS, value: "0"}
- {name: RAY_COLOR_PREFIX, value: "0"}
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "0"}
- {name: RAY_health_check_timeout_ms, value: "800"}
- {name: RAY_health_check_period_ms, value: "100"}
- {name: RAY_health_check_failure_threshold, value: "3"}
- name: RAY_FLAGS
  value: >-
    --node-ip-address=$(POD_IP) --node-manager-port={{ int $ports.nodeManager }}
    --object-manager-port={{ int $ports.objectManager }} --runtime-env-agent-port={{ int $ports.runtimeEnv }}
    --dashboard-agent-listen-port={{ int $ports.dashboardAgent }} --metrics-export-port={{ int $ports.metrics }}
    --dashboard-agent-grpc-port={{ int $ports.dashboardAgentGrpc }}
    --min-worker-port={{ int $ports.workers.min }} --max-worker-port={{ int $ports.workers.max }}
    --num-cpus={{ $ranks }} --num-gpus={{ int .pool.gpus }} --object-store-memory=80000000 --disable-usage-stats
    --log-color=false
{{- end -}}

{{/* The Secret with the token of Ray; the chart makes it unless one is given */}}
{{- define "millrace.raySecret" -}}
{{- default (printf "%s-ray" (include "millrace.fullname" .)) .Values.ray.auth.secretName -}}
{{- end -}}
