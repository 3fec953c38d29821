{{/* The pod of a worker pool, whatever its kind.
     (dict "root" $ "pool" $pool "leader" true) -> a pod template. `leader`: it has the frontend; the other pods of a
     group only lend their devices to the leader's ranks, through Ray, and outlive it when the group ends. */}}
{{- define "millrace.workerPod" -}}
{{- $root := .root }}
{{- $pool := .pool }}
{{- $as := dict "root" $root "component" $pool.role "pool" $pool }}
{{- $fabric := include "millrace.fabric" . | fromJson }}
metadata:
  {{- include "millrace.workerMeta" $as | nindent 2 }}
spec:
  {{- include "millrace.podHead" (dict "root" $root "values" $pool "grace" $pool.grace "serviceAccount"
    $pool.serviceAccountName) | nindent 2 }}
  automountServiceAccountToken: false
  securityContext:
    {{- include "millrace.podSecurity" (dict "root" $root "asRoot" $root.Values.podSecurity.workersAsRoot) | nindent 4 }}
  {{- include "millrace.workerScheduling" $as | nindent 2 }}
  initContainers:
    {{- with $pool.extraInitContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if eq $root.Values.cache.kind "hostPath" }}
    {{- include "millrace.folderOwner" (dict "root" $root "pool" $pool "name" "cache" "path" "/var/cache/millrace") | nindent 4 }}
    {{- end }}
    {{- if and $pool.diskFolder (eq $pool.diskCache.kind "hostPath") }}
    {{- include "millrace.folderOwner" (dict "root" $root "pool" $pool "name" "disk-cache" "path" $pool.diskFolder) | nindent 4 }}
    {{- end }}
    {{- include "millrace.preflight" (dict "root" $root "image" $pool.image "model" $pool.model
        "args" (include "millrace.preflightArgs" (dict "root" $root "pool" $pool "fabric" $fabric) | fromJsonArray)
        "security" (include "millrace.workerSecurity" (dict "root" $root "fabric" $fabric))
        "resources" (include "millrace.workerResources" . | fromYaml)
        "env" (include "millrace.workerEnv" .) "envFrom" $pool.envFrom
        "mounts" (include "millrace.deviceMounts" .)) | nindent 4 }}
  containers:
    - name: worker
      image: {{ $pool.image.reference }}
      imagePullPolicy: {{ $pool.image.pullPolicy }}
      command: [/bin/sh, /etc/millrace/config/start.sh, run]
      args:
        - millrace_serve.{{ ternary "prefill" "decode" (eq $pool.role "prefill") }}
        - --config
        - /etc/millrace/config/config.yaml
        - --set
        - worker_id=$(POD_NAME)
      env:
        {{- include "millrace.workerEnv" . | nindent 8 }}
        {{- if gt (int $pool.size) 1 }}
        {{- include "millrace.rayEnv" . | nindent 8 }}
        {{- end }}
      {{- with $pool.envFrom }}
      envFrom: {{ toJson . }}
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
      resources: {{- include "millrace.workerResources" . | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/millrace/config, readOnly: true}
        - {name: run, mountPath: /run/millrace}
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        {{- include "millrace.deviceMounts" . | nindent 8 }}
        {{- if and $pool.diskFolder $pool.diskCache.kind }}
        - {name: disk-cache, mountPath: {{ $pool.diskFolder }}}
        {{- end }}
        {{- include "millrace.modelMount" $pool.model | nindent 8 }}
        - {name: secret, mountPath: /etc/millrace/secret, readOnly: true}
        {{- if ne $root.Values.tls.mode "off" }}
        - {name: tls, mountPath: /etc/millrace/tls, readOnly: true}
        {{- end }}
    {{- with $pool.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ include "millrace.filesName" (dict "name" $pool.fullname "files" (include "millrace.workerFiles" .)) }}}
    {{- include "millrace.deviceVolumes" . | nindent 4 }}
    {{- if and $pool.diskFolder $pool.diskCache.kind }}
    {{- include "millrace.folderVolume" (dict "name" "disk-cache" "folder" $pool.diskCache) | nindent 4 }}
    {{- end }}
    {{- include "millrace.modelVolume" $pool.model | nindent 4 }}
    - name: secret
      secret: {secretName: {{ include "millrace.deploymentSecret" $root | quote }}, defaultMode: 0440}
    {{- if ne $root.Values.tls.mode "off" }}
    - name: tls
      secret: {secretName: {{ include "millrace.tlsSecret" (dict "root" $root "component" "worker") | quote }}, defaultMode: 0440}
    {{- end }}
{{- end -}}

{{/* pool -> what the chart sets because of its queue and its topology, as JSON: labels and annotations of its object, annotations
     of its pods, their scheduler */}}
{{- define "millrace.gang" -}}
{{- $labels := dict -}}
{{- $annotations := dict -}}
{{- $pods := dict -}}
{{- $volcano := eq .gang.kind "volcano" -}}
{{- if eq .gang.kind "kueue" -}}{{- $_ := set $labels "kueue.x-k8s.io/queue-name" .gang.queue -}}{{- end -}}
{{- if $volcano -}}
{{- $_ := set (ternary $annotations $pods (eq .kind "lws")) "scheduling.volcano.sh/queue-name" .gang.queue -}}
{{- end -}}
{{- if and .topology.key (eq .topology.mode "exclusive") -}}
{{- $_ := set $annotations "leaderworkerset.sigs.k8s.io/exclusive-topology" .topology.key -}}
{{- end -}}
{{- dict "labels" $labels "annotations" $annotations "podAnnotations" $pods "scheduler" (ternary "volcano" "" $volcano) | toJson -}}
{{- end -}}

{{/* (dict "root" $ "pool" $pool "component" "warm") -> the metadata of the pool's pods, those of its job too */}}
{{- define "millrace.workerMeta" -}}
{{- $pool := .pool -}}
{{- $labels := merge (include "millrace.revision" $pool | fromYaml) (default dict $pool.podLabels) -}}
{{- $annotations := merge (include "millrace.gang" $pool | fromJson).podAnnotations (default dict $pool.podAnnotations) (default dict
  (include "millrace.fabric" . | fromJson).annotations) -}}
{{- include "millrace.podMeta" (dict "root" .root "component" .component "pool" $pool.name "labels" $labels "annotations" $annotations) -}}
{{- end -}}

{{/* The same -> where they run. `spread` of a job has nothing to spread */}}
{{- define "millrace.workerScheduling" -}}
{{- $scheduling := deepCopy .pool.scheduling -}}
{{- $_ := set $scheduling "schedulerName" (default (include "millrace.gang" .pool | fromJson).scheduler $scheduling.schedulerName) -}}
{{- if eq .component "warm" -}}{{- $_ := unset $scheduling "spread" -}}{{- end -}}
{{- include "millrace.scheduling" (dict "root" .root "component" .component "pool" .pool.name "scheduling" $scheduling "affinity" (include
  "millrace.workerAffinity" . | fromYaml) "tolerations" (include "millrace.gpuTolerations" . | fromYamlArray)) -}}
{{- end -}}

{{- define "millrace.cacheDir" -}}
/var/cache/millrace/{{ .image.version }}
{{- end -}}

{{- define "millrace.workerEnv" -}}
{{- $fabric := include "millrace.fabric" . | fromJson -}}
{{- $own := printf "%s\n- {name: MILLRACE_CACHE, value: %s}" (include "millrace.ownEnv" .) (include "millrace.cacheDir" .pool) -}}
{{- $own }}
{{- $own = print $own "\n" (include "millrace.rayEnv" .) -}}
{{- include "millrace.env" (dict "at" (print "workers." .pool.name) "own" $own "env" (include "millrace.variables" (list
  $fabric.env .pool.env) | fromJson)) }}
{{- end -}}

{{/* The chart's own: nodes with the right GPU, a group within a domain, the fabric's wishes. matchLabelKeys ties the pods of
     one group together and not those of others, unlike LeaderWorkerSet's exclusive placement, which keeps all other
     groups out of the domain. */}}
{{- define "millrace.workerAffinity" -}}
{{- $fabric := include "millrace.fabric" . | fromJson -}}
{{- $as := dict "root" .root "component" .pool.role "pool" .pool.name -}}
{{- $affinity := dict -}}
{{- with include "millrace.gpuAffinity" . | fromYaml -}}{{- $_ := set $affinity "nodeAffinity" . -}}{{- end -}}
{{- $domain := .pool.topology -}}
{{- if and $domain.key (ne $domain.mode "exclusive") -}}
{{- $term := dict "topologyKey" $domain.key "labelSelector" (dict "matchLabels" (include "millrace.selector" $as | fromYaml))
  "matchLabelKeys" (list "leaderworkerset.sigs.k8s.io/group-key") -}}
{{- $rule := dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term) -}}
{{- if eq $domain.mode "preferred" -}}
{{- $rule = dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term)) -}}
{{- end -}}
{{- $_ := set $affinity "podAffinity" $rule -}}
{{- end -}}
{{- if eq (toString $fabric.apart) "true" -}}
{{- $affinity = merge $affinity (include "millrace.apart" $as | fromYaml) -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}

{{/* Of the preflight too: it sees the devices, and quotas and the class Guaranteed want resources of every container. */}}
{{- define "millrace.workerResources" -}}
{{- mustMergeOverwrite (include "millrace.hostMemory" .pool | fromYaml) (include "millrace.devices" . | fromYaml) | toYaml -}}
{{- end -}}

{{/* {limits, requests} of GPUs and NICs, and DRA claims */}}
{{- define "millrace.devices" -}}
{{- $fabric := include "millrace.fabric" . | fromJson -}}
{{- $devices := dict -}}
{{- if gt (int .pool.gpus) 0 -}}
{{- $devices = merge dict (default dict $fabric.resources) -}}
{{- with .pool.gpuResource -}}{{- $_ := set $devices . (toString $.pool.gpus) -}}{{- end -}}
{{- end -}}
{{- $resources := dict -}}
{{- if $devices -}}{{- $resources = dict "limits" $devices "requests" $devices -}}{{- end -}}
{{- merge $resources (include "millrace.claims" .pool | fromJson) | toYaml -}}
{{- end -}}

{{/* What the init container, the worker and the job that warms caches mount alike */}}
{{- define "millrace.deviceMounts" -}}
{{- $fabric := include "millrace.fabric" . | fromJson -}}
- {name: cache, mountPath: /var/cache/millrace}
{{- with concat (default list $fabric.mounts) (default list .pool.extraVolumeMounts) }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "millrace.deviceVolumes" -}}
{{- $fabric := include "millrace.fabric" . | fromJson -}}
- name: run
  emptyDir: {sizeLimit: 16Mi}
- name: tmp
  emptyDir: {sizeLimit: {{ .pool.tmp }}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .pool.shm }}}
{{ include "millrace.folderVolume" (dict "name" "cache" "folder" .root.Values.cache) }}
{{- with concat (default list $fabric.volumes) (default list .pool.extraVolumes) }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* pool -> its resources, with the host tiers of a pod's replicas beside the memory that was given for everything else.
     auto takes a part of that memory. */}}
{{- define "millrace.hostMemory" -}}
{{- $resources := deepCopy .resources -}}
{{- $replicas := div (int .dp) (int .size) -}}
{{- $more := mulf (get (default dict .config.limits) "host_cache_gib" | default 0.0 | float64) 1024 $replicas | ceil | int64 -}}
{{- if $more -}}
{{- range $amounts := $resources -}}
{{- with $amounts -}}
{{- with .memory -}}
{{- $mib := divf (include "millrace.bytes" . | int64) 1048576000 | ceil | int64 -}}
{{- $_ := set $amounts "memory" (printf "%dMi" (add $mib $more)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* (dict "root" $ "pool" $pool "name" "cache" "path" "/var/cache/millrace"): a folder of the node belongs to root when it is
     made; its owner is what this changes, and nothing below it. A root without capabilities writes to its own folders only. */}}
{{- define "millrace.folderOwner" -}}
- name: {{ .name }}-owner
  image: {{ .pool.image.reference }}
  imagePullPolicy: {{ .pool.image.pullPolicy }}
  command: [chown, "{{ ternary 0 (int .root.Values.podSecurity.runAsUser) .root.Values.podSecurity.workersAsRoot }}:{{ int .root.Values.podSecurity.fsGroup }}", {{ .path }}]
  securityContext:
    runAsNonRoot: false
    runAsUser: 0
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL], add: [CHOWN]}
  resources: {{- include "millrace.hostMemory" .pool | nindent 4 }}
  volumeMounts:
    - {name: {{ .name }}, mountPath: {{ .path }}}
{{- end -}}

{{/* (dict "name" "cache" "folder" {kind, size, hostPath, claim}) */}}
{{- define "millrace.folderVolume" -}}
- name: {{ .name }}
  {{- if eq .folder.kind "hostPath" }}
  hostPath: {path: {{ .folder.hostPath | quote }}, type: DirectoryOrCreate}
  {{- else if eq .folder.kind "pvc" }}
  persistentVolumeClaim: {claimName: {{ .folder.claim | quote }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .folder.size }}}
  {{- end }}
{{- end -}}
