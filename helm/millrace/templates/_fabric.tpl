{{/* Between GPU pods: what a fabric asks for (files/fabrics.yaml, `fabric` in the values), and which nodes have the GPUs. */}}

{{/* (dict "root" $ "pool" $pool) -> what the pool's fabric asks for, as JSON; {} on CPU:
     {"resources": {...}, "annotations": {...}, "env": {...}, "capabilities": [...], "volumes": [...], "mounts": [...],
     "tolerations": [...], "needs": [...], "nics": 8, "devices": ["mlx5_"], "exclude": [], "link": "InfiniBand", "net": "IB",
     "apart": false} */}}
{{- define "millrace.fabric" -}}
{{- $own := .root.Values.fabric -}}
{{- $gpus := int .pool.gpus -}}
{{- if or (eq $gpus 0) (not $own.preset) -}}
{}
{{- else -}}
{{- $preset := index (.root.Files.Get "files/fabrics.yaml" | fromYaml) $own.preset -}}
{{- $resources := dict -}}
{{- range $name, $count := $preset.resources -}}
{{- $_ := set $resources $name (add (mul $gpus (default 0 $count.perGpu)) (default 0 $count.perPod)) -}}
{{- end -}}
{{- $env := default dict $preset.env -}}
{{- if .pool.hostNetwork -}}{{- $env = omit $env "NCCL_SOCKET_IFNAME" "GLOO_SOCKET_IFNAME" -}}{{- end -}}
{{- $nics := ternary 0 (mul $gpus (default 1 $preset.nicsPerGpu)) (default false $preset.tcp) -}}
{{- dict
  "resources" (ternary $resources $own.resources (kindIs "invalid" $own.resources))
  "annotations" (mustMerge (deepCopy (default dict $own.annotations)) (default dict $preset.annotations))
  "env" (mustMerge (deepCopy (default dict $own.env)) $env)
  "capabilities" (ternary $preset.capabilities $own.capabilities (kindIs "invalid" $own.capabilities))
  "volumes" (default list $preset.volumes)
  "mounts" (default list $preset.mounts)
  "tolerations" (default list $preset.tolerations)
  "needs" (default list $preset.needs)
  "nics" (ternary $nics (int $own.nics) (or (eq (int $own.nics) 0) (default false $preset.tcp)))
  "devices" (default (default list $preset.devices) $own.devices)
  "exclude" (default list $own.exclude)
  "link" (default (default "" $preset.link) $own.link)
  "net" (default "" $preset.net)
  "apart" (default false $preset.apart)
  | toJson -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "pool" $pool "fabric" $fabric) -> arguments of files/preflight.py, as JSON */}}
{{- define "millrace.preflightArgs" -}}
{{- $fabric := .fabric -}}
{{- $args := list "--cache" "/var/cache/millrace" -}}
{{- if include "millrace.downloads" .pool.model -}}{{- $args = append $args "--marker" -}}{{- end -}}
{{- range $fabric.needs -}}{{- $args = concat $args (list "--needs" .) -}}{{- end -}}
{{- if $fabric.nics -}}
{{- $args = concat $args (list "--nics" (toString $fabric.nics) "--devices" (join "," $fabric.devices)
  "--exclude" (join "," $fabric.exclude) "--link" $fabric.link "--net" $fabric.net "--env" "/run/millrace/fabric.env") -}}
{{- if .root.Values.fabric.allowTcp -}}{{- $args = append $args "--allow-tcp" -}}{{- end -}}
{{- end -}}
{{- toJson $args -}}
{{- end -}}

{{/* (dict "root" $ "fabric" $fabric) -> a container's securityContext */}}
{{- define "millrace.workerSecurity" -}}
{{- if .root.Values.fabric.privileged -}}
privileged: true
{{- else -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]{{ with .fabric.capabilities }}, add: {{ toJson . }}{{ end }}}
{{- end }}
readOnlyRootFilesystem: true
{{- end -}}

{{/* A prefill pod beside no decode pod, and the other way round */}}
{{- define "millrace.apart" -}}
{{- if has .component (list "prefill" "decode") }}
podAntiAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels:
          app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
          app.kubernetes.io/component: {{ ternary "decode" "prefill" (eq .component "prefill") }}
{{- end }}
{{- end -}}

{{/* What a pool's gpuModel says of a part of a GPU: -MIG-1g.18gb, -SHARED, both or nothing */}}
{{- define "millrace.gpuPart" -}}
{{- regexFind "(-MIG-[0-9]+g[.][0-9]+gb([.]me)?)?(-SHARED)?$" . -}}
{{- end -}}

{{/* (dict "root" $ "pool" $pool) -> a nodeAffinity: any of the labels that nodes with pool.gpuModel have; empty for any GPU.
     Only GPU feature discovery tells parts of GPUs: after the product. */}}
{{- define "millrace.gpuAffinity" -}}
{{- if and .pool.gpuModel (gt (int .pool.gpus) 0) }}
{{- $part := include "millrace.gpuPart" .pool.gpuModel }}
{{- $labels := (index (.root.Files.Get "files/gpus.yaml" | fromYaml) (trimSuffix $part .pool.gpuModel)).nodes }}
{{- if $part }}{{- $labels = pick $labels "nvidia.com/gpu.product" }}{{- end }}
requiredDuringSchedulingIgnoredDuringExecution:
  nodeSelectorTerms:
    {{- range $label, $models := $labels }}
    {{- $values := list }}
    {{- range $models }}{{- $values = append $values (print . $part) }}{{- end }}
    - matchExpressions: [{key: {{ $label }}, operator: In, values: {{ toJson $values }}}]
    {{- end }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "pool" $pool) -> a list: of the taints that keep other pods off GPU nodes, which are nvidia.com/gpu for parts
     of GPUs (nvidia.com/mig-1g.18gb, nvidia.com/gpu.shared) too */}}
{{- define "millrace.gpuTolerations" -}}
{{- $all := list -}}
{{- if gt (int .pool.gpus) 0 -}}
{{- range list "nvidia.com/gpu" .pool.gpuResource | compact | uniq -}}
{{- $all = append $all (dict "key" . "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- $all = concat $all (default list (include "millrace.fabric" . | fromJson).tolerations) -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{/* Of the root context: what of `fabric` cannot work. Included by millrace.checks */}}
{{- define "millrace.checkFabric" -}}
{{- $fabric := .Values.fabric -}}
{{- if and (eq $fabric.preset "tcp-dev") (not $fabric.allowTcp) -}}
{{- fail "fabric.allowTcp: must be true with fabric.preset=tcp-dev" -}}
{{- end -}}
{{- if and $fabric.privileged (not $fabric.acknowledgePrivileged) -}}
{{- fail "fabric.acknowledgePrivileged: must be true with fabric.privileged: such a pod owns its node" -}}
{{- end -}}
{{- range include "millrace.pools" . | fromJson -}}
{{- if gt (int .gpus) 0 -}}
{{- include "millrace.checkFabricOfPool" (dict "root" $ "pool" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "millrace.checkFabricOfPool" -}}
{{- $own := .root.Values.fabric -}}
{{- $at := printf "workers.%s" .pool.name -}}
{{- if and (not $own.preset) (or (ne .pool.role "unified") (gt (int .pool.size) 1)) -}}
{{- fail (printf "fabric.preset: required, %s moves data between GPU pods" $at) -}}
{{- end -}}
{{- $models := .root.Files.Get "files/gpus.yaml" | fromYaml -}}
{{- if and .pool.gpuModel (not (hasKey $models (trimSuffix (include "millrace.gpuPart" .pool.gpuModel) .pool.gpuModel))) -}}
{{- fail (printf "%s.gpuModel: must be one of %s, not %q; or select nodes with scheduling.nodeSelector" $at (keys
  $models | sortAlpha | join ", ") .pool.gpuModel) -}}
{{- end -}}
{{- with $own.preset -}}
{{- $preset := index ($.root.Files.Get "files/fabrics.yaml" | fromYaml) . -}}
{{- if and (hasKey $preset "ownImage") (eq $.root.Values.images.gpuWorker.repository "millrace-worker-gpu") -}}
{{- fail (printf "images.gpuWorker.repository: fabric.preset=%s needs an image of yours, with NIXL and UCX built on the node's RDMA libraries; those of %s cannot see its NICs" . $.pool.image.reference) -}}
{{- end -}}
{{- if and (hasKey $preset "groups") (gt (int $.pool.size) 1) -}}
{{- fail (printf "%s.size: must be 1 with fabric.preset=%s, whose NICs the image's NCCL cannot use between pods" $at .) -}}
{{- end -}}
{{- $networks := hasKey (default dict $own.annotations) "networking.gke.io/interfaces" -}}
{{- if and $preset.gpus (ne (int $.pool.gpus) (int $preset.gpus)) (not $networks) -}}
{{- fail (printf
  "%s.gpus: must be %d with fabric.preset=%s, which gives a pod as many networks; or say which in fabric.annotations" $at
  (int $preset.gpus) .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
