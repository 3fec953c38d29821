{{/* The pod of a worker pool, whatever its kind.
     (dict "root" $ "pool" $pool "leader" true) -> a pod template. `leader`: it has the frontend; the other pods of a
     group only lend their devices to the leader's ranks, through Ray, and outlive it when the group ends. */}}
{{- define "millrace.workerPod" -}}
{{- $root := .root }}
{{- $pool := .pool }}
{{- $as := dict "root" $root "component" $pool.role "pool" $pool.name }}
{{- $fabric := include "millrace.fabric" . | fromJson }}
{{- $grouped := gt (int $pool.size) 1 }}
{{- $config := include "millrace.workerConfig" . }}
{{- $files := print ($root.Files.Get "files/preflight.py") ($root.Files.Get "files/start.sh") }}
{{- $devices := dict }}
{{- if gt (int $pool.gpus) 0 }}
{{- $devices = merge (dict $pool.gpuResource (toString $pool.gpus)) (default dict $fabric.resources) }}
{{- end }}
{{- $resources := mustMergeOverwrite (deepCopy $pool.resources) (dict "limits" $devices "requests" $devices) }}
metadata:
  labels:
    {{- include "millrace.podLabels" $as | nindent 4 }}
    {{- with $pool.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ sha256sum (print $config $files) }}
    {{- with merge (deepCopy $pool.podAnnotations) (default dict $fabric.annotations) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ int $pool.terminationGracePeriodSeconds }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets: {{ toJson . }}
  {{- end }}
  securityContext:
    {{- include "millrace.podSecurity" $root | nindent 4 }}
  {{- $affinity := ternary (include "millrace.apart" $as | fromYaml) dict (eq (toString $fabric.apart) "true") }}
  {{- include "millrace.scheduling" (merge (dict "scheduling" $pool.scheduling "affinity" $affinity) $as) | nindent 2 }}
  initContainers:
    {{- include "millrace.preflight" (dict "root" $root "image" $root.Values.images.worker
        "args" (include "millrace.preflightArgs" (dict "root" $root "fabric" $fabric) | fromJsonArray)
        "security" (include "millrace.workerSecurity" (dict "root" $root "fabric" $fabric))
        "resources" (dict "limits" $devices "requests" $devices)
        "mounts" "- {name: cache, mountPath: /var/cache/millrace}") | nindent 4 }}
  containers:
    - name: worker
      image: {{ include "millrace.image" (dict "root" $root "image" $root.Values.images.worker) }}
      imagePullPolicy: {{ $root.Values.images.worker.pullPolicy }}
      command: [/bin/sh, /etc/millrace/config/start.sh, run]
      args:
        - millrace_serve.{{ ternary "prefill" "decode" (eq $pool.role "prefill") }}
        - --config
        - /etc/millrace/config/config.yaml
        - --set
        - worker_id=$(POD_NAME)
      env:
        {{- include "millrace.ownEnv" . | nindent 8 }}
        {{- include "millrace.env" (mustMerge (deepCopy $pool.env) (default dict $fabric.env)) | nindent 8 }}
        {{- if $grouped }}
        {{- include "millrace.rayEnv" . | nindent 8 }}
        {{- end }}
      {{- if .leader }}
      ports:
        - {name: grpc, containerPort: {{ int $pool.ports.grpc }}}
        - {name: metrics, containerPort: {{ int $pool.ports.metrics }}}
        - {name: health, containerPort: {{ int $pool.ports.health }}}
      {{- include "millrace.probes" (dict "port" $pool.ports.health "startup" $pool.startup "startupService" "") |
        nindent 6 }}
      {{- end }}
      lifecycle:
        {{- if .leader }}
        preStop: {exec: {command: [sleep, {{ $pool.drain.preStop | quote }}]}}
        {{- else }}
        preStop: {exec: {command: [/bin/sh, /etc/millrace/config/start.sh, linger]}}
        {{- end }}
      securityContext:
        {{- include "millrace.workerSecurity" (dict "root" $root "fabric" $fabric) | nindent 8 }}
      resources: {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/millrace/config, readOnly: true}
        - {name: run, mountPath: /run/millrace}
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        - {name: cache, mountPath: /var/cache/millrace}
        {{- include "millrace.modelMount" $root | nindent 8 }}
        {{- if ne $root.Values.tls.mode "off" }}
        - {name: tls, mountPath: /etc/millrace/tls, readOnly: true}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ $pool.fullname }}}
    - name: run
      emptyDir: {}
    - name: tmp
      emptyDir: {}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $pool.shm }}}
    {{- include "millrace.cacheVolume" $root | nindent 4 }}
    {{- include "millrace.modelVolume" $root | nindent 4 }}
    {{- if ne $root.Values.tls.mode "off" }}
    - name: tls
      secret: {secretName: {{ include "millrace.tlsSecret" (dict "root" $root "component" "worker") }}, defaultMode: 0440}
    {{- end }}
{{- end -}}

{{/* A prefill pod beside no decode pod, and the other way round */}}
{{- define "millrace.apart" -}}
{{- if ne .component "unified" }}
podAntiAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels:
          app.kubernetes.io/instance: {{ .root.Release.Name }}
          app.kubernetes.io/component: {{ ternary "decode" "prefill" (eq .component "prefill") }}
{{- end }}
{{- end -}}

{{- define "millrace.preflightArgs" -}}
{{- $args := list "--writable" "/var/cache/millrace" -}}
{{- if include "millrace.downloads" .root -}}{{- $args = append $args "--marker" -}}{{- end -}}
{{- if .fabric.nics -}}
{{- $args = concat $args (list "--nics" (toString .fabric.nics) "--devices" .fabric.devices "--link" .fabric.link
  "--env" "/run/millrace/fabric.env") -}}
{{- if .root.Values.fabric.allowTcp -}}{{- $args = append $args "--allow-tcp" -}}{{- end -}}
{{- end -}}
{{- toJson $args -}}
{{- end -}}

{{- define "millrace.workerSecurity" -}}
{{- if .root.Values.fabric.privileged -}}
privileged: true
{{- else -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]{{ with .fabric.capabilities }}, add: {{ toJson . }}{{ end }}}
{{- end }}
readOnlyRootFilesystem: true
{{- end -}}

{{/* Ray's pinned ports. --node-ip-address: with several NICs Ray may name a node by an address that no peer reaches
  */}}
{{- define "millrace.rayEnv" -}}
{{- $ports := .root.Values.ray.ports -}}
{{- $ranks := div (mul (int .pool.dp) (int .pool.tp)) (int .pool.size) -}}
- {name: RAY_PORT, value: "{{ int $ports.gcs }}"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- name: RAY_FLAGS
  value: >-
    --node-ip-address=$(POD_IP) --node-manager-port={{ int $ports.nodeManager }}
    --object-manager-port={{ int $ports.objectManager }} --runtime-env-agent-port={{ int $ports.runtimeEnv }}
    --dashboard-agent-listen-port={{ int $ports.dashboardAgent }} --metrics-export-port={{ int $ports.metrics }}
    --min-worker-port={{ int $ports.workers.min }} --max-worker-port={{ int $ports.workers.max }}
    --num-cpus={{ $ranks }} --num-gpus={{ int .pool.gpus }} --disable-usage-stats
{{- end -}}

{{- define "millrace.cacheVolume" -}}
- name: cache
  {{- if eq .Values.cache.kind "hostPath" }}
  hostPath: {path: {{ .Values.cache.hostPath | quote }}, type: Directory}
  {{- else if eq .Values.cache.kind "pvc" }}
  persistentVolumeClaim: {claimName: {{ .Values.cache.claim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.cache.size }}}
  {{- end }}
{{- end -}}
