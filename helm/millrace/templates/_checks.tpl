{{/* Combinations that cannot work, each with a message that names the values. Included by every workload. */}}

{{- define "millrace.bytes" -}}
{{- $text := include "millrace.text" . -}}
{{- $units := dict "m" 0.001 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "k" 1000 "M" 1000000
  "G" 1000000000 "T" 1000000000000 "P" 1000000000000000 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- mulf (regexFind "^[0-9.]+" $text | float64) (ternary 1 (get $units $unit) (eq $unit "")) 1000 | int64 -}}
{{- end -}}

{{- define "millrace.checkGrace" -}}
{{- $least := include "millrace.grace" (set (deepCopy .values) "terminationGracePeriodSeconds" nil) | int -}}
{{- if lt (include "millrace.grace" .values | int) $least -}}
{{- fail (printf "%s.terminationGracePeriodSeconds: %d is too short: drain.preStop %d + drain.timeout %d + %s15 = %d"
  .name (int .values.terminationGracePeriodSeconds) (int .values.drain.preStop) (int .values.drain.timeout)
  (ternary "config.timeouts.lease + " "" (hasKey .values "role")) $least) -}}
{{- end -}}
{{- end -}}

{{/* (dict "name" "router.ports" "ports" {...}): every port once. Host networks share the node's, so there it matters even more */}}
{{- define "millrace.checkPorts" -}}
{{- $seen := dict -}}
{{- range $name, $port := .ports -}}
{{- $key := toString (int $port) -}}
{{- if hasKey $seen $key -}}
{{- fail (printf "%s: %s and %s are both %s" $.name (get $seen $key) $name $key) -}}
{{- end -}}
{{- $_ := set $seen $key $name -}}
{{- end -}}
{{- end -}}

{{/* (dict "name" "router" "resources" {...}). Of devices and huge pages Kubernetes takes no request but the limit */}}
{{- define "millrace.checkResources" -}}
{{- $limits := default dict .resources.limits -}}
{{- range $resource, $amount := default dict .resources.requests -}}
{{- if and (or (contains "/" $resource) (hasPrefix "hugepages-" $resource)) (ne (toString $amount) (get $limits $resource | toString)) -}}
{{- fail (printf "%s.resources.requests.%s: %s must be the limit, which is %s" $.name $resource (include "millrace.text" $amount) (get
  $limits $resource | default "nothing" | include "millrace.text")) -}}
{{- end -}}
{{- if hasKey $limits $resource -}}
{{- if gt (include "millrace.bytes" $amount | int64) (include "millrace.bytes" (get $limits $resource) | int64) -}}
{{- fail (printf "%s.resources.requests.%s: %s is above the limit %s" $.name $resource (include "millrace.text" $amount) (include
  "millrace.text" (get $limits $resource))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "pool" $pool): of a group */}}
{{- define "millrace.checkRay" -}}
{{- $ray := .root.Values.ray.ports -}}
{{- $ports := merge (omit $ray "workers") (dict "grpc" .pool.ports.grpc "worker metrics" .pool.ports.metrics "health"
  .pool.ports.health) -}}
{{- include "millrace.checkPorts" (dict "name" "ray.ports" "ports" $ports) -}}
{{- $min := int $ray.workers.min -}}
{{- $max := int $ray.workers.max -}}
{{- range $name, $port := $ports -}}
{{- if and (ge (int $port) $min) (le (int $port) $max) -}}
{{- fail (printf "ray.ports.workers: %d to %d has the port %d of %s" $min $max (int $port) $name) -}}
{{- end -}}
{{- end -}}
{{- $ranks := div (mul (int .pool.dp) (int .pool.tp)) (int .pool.size) -}}
{{- if lt (sub $max $min | int) (mul 4 $ranks | int) -}}
{{- fail (printf "ray.ports.workers: %d to %d is too few for %d ranks of a pod, which need 4 each" $min $max $ranks) -}}
{{- end -}}
{{- end -}}

{{/* (dict "at" "router" "ports" {...} "pod" TEXT) -> the pod template, if what a user adds to the pod fits the rest of it. An API
     server sees pods only after the install. `ports`: those of the main container, by name */}}
{{- define "millrace.checkedPod" -}}
{{- $at := .at -}}
{{- $spec := (fromYaml .pod).spec -}}
{{- $containers := concat $spec.containers (default list $spec.initContainers) -}}
{{- range $what, $items := dict "containers" $containers "volumes" $spec.volumes "resourceClaims" $spec.resourceClaims -}}
{{- include "millrace.checkNames" (dict "at" $at "what" $what "items" $items) -}}
{{- end -}}
{{- range $containers -}}
{{- include "millrace.checkMounts" (dict "at" $at "container" .name "mounts" .volumeMounts "volumes" $spec.volumes) -}}
{{- end -}}
{{- include "millrace.checkTolerations" (dict "at" $at "tolerations" $spec.tolerations) -}}
{{- $ports := deepCopy .ports -}}
{{- range $container := rest $containers -}}
{{- range $index, $port := $container.ports -}}
{{- if eq (default "TCP" $port.protocol) "TCP" -}}
{{- $_ := set $ports (printf "%s.ports[%d]" $container.name $index) $port.containerPort -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "millrace.checkPorts" (dict "name" (print $at ".ports") "ports" $ports) -}}
{{- .pod -}}
{{- end -}}

{{/* (dict "at" "router" "tolerations" [...]) */}}
{{- define "millrace.checkTolerations" -}}
{{- $known := dict "operator" (list "Exists" "Equal" "Lt" "Gt") "effect" (list "NoSchedule" "PreferNoSchedule" "NoExecute") -}}
{{- range $toleration := .tolerations -}}
{{- range $key, $words := $known -}}
{{- $word := get $toleration $key -}}
{{- if and $word (not (has $word $words)) -}}
{{- fail (printf "%s.scheduling.tolerations: %s %v is none of %s" $.at $key $word (join ", " $words)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (dict "at" "router" "what" "volumes" "items" [...]): each has a name, and another one than the others of the pod */}}
{{- define "millrace.checkNames" -}}
{{- $seen := dict -}}
{{- range .items -}}
{{- if not (regexMatch "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$" (toString .name)) -}}
{{- fail (printf "%s: %v is no name for %s of a pod, which has at most 63 small letters, digits and dashes" $.at .name $.what) -}}
{{- end -}}
{{- if hasKey $seen .name -}}
{{- fail (printf "%s: two %s of a pod are called %s; choose another name than the chart's own and than each other" $.at $.what .name) -}}
{{- end -}}
{{- $_ := set $seen .name true -}}
{{- end -}}
{{- end -}}

{{/* (dict "at" "router" "container" NAME "mounts" [...] "volumes" [...]). Folders below a Secret or a ConfigMap cannot be made */}}
{{- define "millrace.checkMounts" -}}
{{- $names := list -}}
{{- $fixed := list -}}
{{- range .volumes -}}
{{- $names = append $names .name -}}
{{- if or .secret .configMap -}}{{- $fixed = append $fixed .name -}}{{- end -}}
{{- end -}}
{{- $seen := dict -}}
{{- range .mounts -}}
{{- $path := clean .mountPath -}}
{{- if not (has .name $names) -}}
{{- fail (printf "%s: the container %s mounts %s, and no volume of the pod is called that" $.at $.container .name) -}}
{{- end -}}
{{- if hasKey $seen $path -}}
{{- fail (printf "%s: the container %s mounts both %s and %s at %s" $.at $.container (get $seen $path) .name $path) -}}
{{- end -}}
{{- $_ := set $seen $path .name -}}
{{- range $.mounts -}}
{{- if and (has .name $fixed) (hasPrefix (print (clean .mountPath) "/") $path) -}}
{{- fail (printf "%s: the container %s has a mount at %s, below %s, a read-only Secret or ConfigMap" $.at $.container $path .mountPath) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (dict "at" "router.labels" "given" {...} "own" {...}): keys that the chart sets itself, and would set otherwise */}}
{{- define "millrace.checkKeys" -}}
{{- range $key, $_ := .given -}}
{{- if or (hasKey $.own $key) (regexMatch "^(app[.]kubernetes[.]io/(name|instance|component|part-of|version|managed-by)|helm[.]sh/(chart|hook.*)|millrace/.*)$" $key) -}}
{{- fail (printf "%s.%s: the chart sets this key itself" $.at $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels and annotations of everything that has any */}}
{{- define "millrace.checkMetadata" -}}
{{- $given := dict "" (pick .Values "labels" "annotations") "monitoring" .Values.monitoring "monitoring.dashboards" .Values.monitoring.dashboards "jobs" .Values.jobs "test"
  .Values.test "router" .Values.router "router.service" .Values.router.service "serviceAccount" .Values.serviceAccount -}}
{{- range include "millrace.pools" . | fromJson -}}{{- $_ := set $given (print "workers." .name) . -}}{{- end -}}
{{- range $at, $section := $given -}}
{{- $own := dict -}}
{{- if hasKey $section "gang" -}}{{- $own = include "millrace.gang" $section | fromJson -}}{{- end -}}
{{- range $kind := list "labels" "annotations" "podLabels" "podAnnotations" -}}
{{- include "millrace.checkKeys" (dict "at" (printf "%s.%s" $at $kind | trimPrefix ".") "given" (index $section $kind) "own"
  (default dict (index $own $kind))) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (dict "at" "router" "kind" "Deployment" "name" NAME "root" $ "component" "router" "pool" ""): a selector that an upgrade cannot change */}}
{{- define "millrace.checkSelector" -}}
{{- $live := lookup "apps/v1" .kind .root.Release.Namespace .name | dig "spec" "selector" "matchLabels" dict -}}
{{- range $key, $value := include "millrace.selector" . | fromYaml -}}
{{- if and $live (ne (toString (get $live $key)) (toString $value)) -}}
{{- fail (printf "%s: the %s %s of the cluster has %s=%v, and an upgrade cannot make it %v; give another name, or delete the object first"
  $.at $.kind $.name $key (get $live $key) $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "millrace.checkScaling" -}}
{{- $scaling := .values.autoscaling -}}
{{- if and (eq $scaling.kind "keda") (not (regexMatch "^[0-9.e+]*$" (default "" $scaling.target | toString))) -}}
{{- fail (printf "%s.autoscaling.target: KEDA takes a plain number, not %v" .name $scaling.target) -}}
{{- end -}}
{{- if and (ne $scaling.kind "keda") (default "" $scaling.query) -}}
{{- fail (printf "%s.autoscaling.query: only with kind=keda" .name) -}}
{{- end -}}
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
{{- else if lt (int .values.replicas) 1 -}}
{{- fail (printf "%s.replicas: must be at least 1, not %d; a pool set to null is left out" .name (int .values.replicas)) -}}
{{- end -}}
{{- if has (toString .values.pdb.maxUnavailable) (list "0" "0%") -}}
{{- fail (printf "%s.pdb.maxUnavailable: must be above 0, not %v: no node could be drained" .name .values.pdb.maxUnavailable) -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "pool" $pool): what the pool's own affinity would replace of what other values ask for */}}
{{- define "millrace.checkPlacement" -}}
{{- $own := default dict .pool.scheduling.affinity -}}
{{- $topology := .pool.topology -}}
{{- $asked := dict "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (ternary .pool.gpuModel "" (gt (int .pool.gpus) 0)))
  "podAffinity" (dict (print $topology.mode "DuringSchedulingIgnoredDuringExecution") (ternary "" $topology.key (eq $topology.mode
  "exclusive"))) -}}
{{- range $kind, $whens := $asked -}}
{{- range $when, $value := $whens -}}
{{- $given := get $own $kind -}}
{{- if and $value (hasKey $own $kind) (or (not $given) (hasKey (default dict $given) $when)) -}}
{{- fail (printf "workers.%s.scheduling.affinity.%s: replaces what is %s for %s %s; leave one of them out" $.pool.name $kind (trimSuffix
  "DuringSchedulingIgnoredDuringExecution" $when) (ternary "gpuModel" "topology.key" (eq $kind "nodeAffinity")) $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (not $topology.key) (ne $topology.mode "preferred") -}}
{{- fail (printf "workers.%s.topology.mode: %s needs topology.key" .pool.name $topology.mode) -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "pool" $pool): what the chart counts itself */}}
{{- define "millrace.checkDevices" -}}
{{- $devices := (include "millrace.devices" . | fromYaml).limits -}}
{{- range $kind, $amounts := .pool.resources -}}
{{- range $name, $_ := $amounts -}}
{{- if hasKey (default dict $devices) $name -}}
{{- fail (printf "workers.%s.resources.%s.%s: the chart sets it from gpus, gpuResource and fabric" $.pool.name $kind $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "pool" $pool): what an API server would refuse to change, when half of an upgrade is done. `helm template` and
     Argo CD see no cluster. A group's Service is made by LeaderWorkerSet */}}
{{- define "millrace.checkLive" -}}
{{- $at := print "workers." .pool.name -}}
{{- $group := eq .pool.kind "lws" -}}
{{- $service := lookup "v1" "Service" .root.Release.Namespace .pool.fullname | dig "spec" "selector" dict -}}
{{- if and $service (ne $group (hasKey $service "leaderworkerset.sigs.k8s.io/name")) -}}
{{- fail (printf "%s.kind: the cluster has a Service %s of a pool of another kind, in the way of %s; give the pool another name, or set it to null for one upgrade"
  $at .pool.fullname .pool.kind) -}}
{{- end -}}
{{- /* KEDA's webhook refuses a workload that another autoscaler has, and Helm deletes the old one last */ -}}
{{- if and (eq .pool.autoscaling.kind "keda") (lookup "autoscaling/v2" "HorizontalPodAutoscaler" .root.Release.Namespace .pool.fullname) -}}
{{- fail (printf "%s.autoscaling.kind: the cluster has a HorizontalPodAutoscaler %s, in the way of keda; set the kind to none for one upgrade"
  $at .pool.fullname) -}}
{{- end -}}
{{- if not $group -}}
{{- include "millrace.checkSelector" (dict "at" $at "kind" (ternary "StatefulSet" "Deployment" (eq .pool.kind "statefulset")) "name"
  .pool.fullname "root" .root "component" .pool.role "pool" .pool.name) -}}
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
{{- $images := $root.Values.images -}}
{{- if not (has $pool.role (list "prefill" "decode" "unified" "flexible")) -}}
{{- fail (printf "%s.role: required, because %q is none of prefill, decode, unified and flexible" $at $pool.name) -}}
{{- end -}}
{{- if and (gt (int $pool.gpus) 0) (not $images.registry) (not (contains "/" $images.gpuWorker.repository)) (ne
  $pool.image.pullPolicy "Never") -}}
{{- fail (printf "images.registry: required for the GPUs of %s, because the images are not published: `make images` prints how to build and push them (pullPolicy Never: they are on the nodes)" $at) -}}
{{- end -}}
{{- if and (gt (int $pool.gpus) 0) (not $pool.gpuResource) (not $pool.resourceClaims) -}}
{{- fail (printf "%s.gpuResource: required, or resourceClaims that bring the GPUs" $at) -}}
{{- end -}}
{{- $reserved := list "router" "router-pods" "secret" "ray" "test" "tests" "workers" -}}
{{- if or (has $pool.name $reserved) (regexMatch "(^|-)(leaders|warm|download|tls|egress)(-|$)" $pool.name) -}}
{{- fail (printf "%s: objects of the chart have this name; choose another" $at) -}}
{{- end -}}
{{- /* Labels of 63 have a StatefulSet's name and a hash of 10; in a group's also the number of the last group */ -}}
{{- $last := sub (ternary (int $pool.replicas) (int $pool.autoscaling.maxReplicas) (eq $pool.autoscaling.kind "none")) 1 -}}
{{- $longest := ternary (sub 51 (max 2 (toString $last | len))) 52 (eq $pool.kind "lws") -}}
{{- if gt (len $pool.fullname) (int $longest) -}}
{{- fail (printf "%s: the name %s has more than %d characters; give a shorter name of the pool, or fullnameOverride" $at $pool.fullname
  $longest) -}}
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
{{- if and (get (default dict $pool.config.limits) "host_cache_gib") (mod (int $pool.dp) (int $pool.size)) -}}
{{- fail (printf "%s.config.limits.host_cache_gib: the ranks of a replica share one pod's memory, but size %d pods have dp %d replicas"
  $at (int $pool.size) (int $pool.dp)) -}}
{{- end -}}
{{- $parts := eq (default dict $pool.config | dig "expert_tp" false | toString) "true" -}}
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
{{- fail (printf "%s.shm: %s is not below resources.limits.memory %s, which it counts towards" $at (include
  "millrace.text" $pool.shm) (include "millrace.text" .memory)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $pool.guaranteed -}}
{{- if not (regexMatch "^[1-9][0-9]*$" (toString $pool.resources.limits.cpu)) -}}
{{- fail (printf "%s.resources.requests.cpu: %v is not a whole number of CPUs, which guaranteed needs" $at (default "nothing"
  $pool.resources.limits.cpu)) -}}
{{- end -}}
{{- if not $pool.resources.limits.memory -}}
{{- fail (printf "%s.resources.limits.memory: required with guaranteed" $at) -}}
{{- end -}}
{{- end -}}
{{- if lt (int $pool.startup) (int $needed) -}}
{{- fail (printf
  "%s.startup: %d s is shorter than config.timeouts.start + warmup = %d s, so slow starts would be killed" $at (int
  $pool.startup) $needed) -}}
{{- end -}}
{{- if and $pool.topology.key (eq $pool.topology.mode "required") (semverCompare "<1.31.0-0"
  $root.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "%s.topology.mode: required needs Kubernetes 1.31 (matchLabelKeys), not %s; preferred and exclusive do not"
  $at $root.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and $pool.topology.key (ne $pool.kind "lws") -}}
{{- fail (printf "%s.topology: only with kind=lws" $at) -}}
{{- end -}}
{{- if and (ne $pool.gang.kind "none") (not $pool.gang.queue) -}}
{{- fail (printf "%s.gang.queue: required with gang.kind=%s" $at $pool.gang.kind) -}}
{{- end -}}
{{- if and (eq $pool.gang.kind "none") $pool.gang.queue -}}
{{- fail (printf "%s.gang.queue: %s needs gang.kind kueue or volcano" $at $pool.gang.queue) -}}
{{- end -}}
{{- include "millrace.checkPlacement" . -}}
{{- include "millrace.checkDevices" . -}}
{{- include "millrace.checkLive" . -}}
{{- if and $pool.hostNetwork (gt (int $pool.replicas) 1) (not (default dict $pool.scheduling.affinity).podAntiAffinity) (eq (int $pool.gpus)
  0) -}}
{{- fail (printf "%s.hostNetwork: two pods of one node would share ports; give scheduling.affinity.podAntiAffinity" $at) -}}
{{- end -}}
{{- include "millrace.checkPorts" (dict "name" (print $at ".ports") "ports" $pool.ports) -}}
{{- include "millrace.checkResources" (dict "name" $at "resources" $pool.resources) -}}
{{- include "millrace.checkDisk" $pool -}}
{{- if gt (int $pool.size) 1 -}}{{- include "millrace.checkRay" . -}}{{- end -}}
{{- if and $root.Values.cache.warm (gt (int $pool.gpus) 0) (gt (int $pool.size) 1) -}}
{{- fail (printf "cache.warm: %s has workers of %d pods, and a job has one; its first start fills the cache" $at (int
  $pool.size)) -}}
{{- end -}}
{{- include "millrace.checkGrace" (dict "name" $at "values" $pool) -}}
{{- include "millrace.checkScaling" (dict "name" $at "values" $pool) -}}
{{- end -}}

{{/* With limits, decode workers run prompts, which would be launched op by op. */}}
{{- define "millrace.checkPromptGraphs" -}}
{{- $limits := default dict (default dict .Values.router.config).routing | dig "slo" dict -}}
{{- range include "millrace.pools" . | fromJson -}}
{{- $rows := default dict .config | dig "chunk_graph_tokens" "auto" | toString -}}
{{- if and (eq .role "decode") (gt (int .gpus) 0) (eq $rows "0") $limits -}}
{{- fail (printf "workers.%s.config.chunk_graph_tokens: 0 leaves the prompts that router.config.routing.slo gives to decode workers without graphs; use auto" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "millrace.checkPairs" -}}
{{- include "millrace.checkPromptGraphs" . -}}
{{- $pools := include "millrace.pools" . | fromJson -}}
{{- if not $pools -}}
{{- fail "workers: every pool is null; at least a unified or a flexible one, or a prefill and a decode pool, must be left" -}}
{{- end -}}
{{- $revisions := dict -}}
{{- range $pools -}}
{{- if ne .role "unified" -}}
{{- $_ := set $revisions .revision (append (get $revisions .revision | default list) .) -}}
{{- end -}}
{{- end -}}
{{- range $revision, $pair := $revisions -}}
{{- include "millrace.checkRevision" (dict "revision" $revision "pools" $pair) -}}
{{- end -}}
{{- end -}}

{{/* (dict "revision" "" "pools" [...]): pools that are to pair with each other */}}
{{- define "millrace.checkRevision" -}}
{{- $of := ternary "" (printf " of revision %s" .revision) (eq .revision "") -}}
{{- $roles := dict -}}
{{- range .pools -}}{{- $_ := set $roles .role true -}}{{- end -}}
{{- if ne (hasKey $roles "prefill") (hasKey $roles "decode") -}}
{{- fail (printf "workers: prefill and decode pools%s need each other; a single pool has role=unified or flexible" $of) -}}
{{- end -}}
{{- range $key := list "kv_dtype" "dtype" "limits.page_size" "limits.checks" "limits.draft_tokens" -}}
{{- $seen := dict -}}
{{- range $.pools -}}
{{- $path := splitList "." $key -}}
{{- $section := ternary .config (default dict .config.limits) (eq (len $path) 1) -}}
{{- $value := index $section (last $path) -}}
{{- $own := not (has (toString $value) (list "<nil>" "auto")) -}}
{{- $gpus := gt (int .gpus) 0 -}}
{{- if eq $key "limits.checks" -}}{{- $value = has "canary" (default list $value) -}}{{- end -}}
{{- /* auto, as services/millrace_serve/plan/settings.py decides it; a page has an MTP layer, or it has none */ -}}
{{- if and (eq $key "kv_dtype") (not $own) -}}
{{- $value = ternary "float8_e4m3fn" "auto" (and $gpus (eq (toString .config.goal) "throughput")) -}}
{{- end -}}
{{- if eq $key "limits.draft_tokens" -}}{{- $value = ternary (ne (toString $value) "0") $gpus $own -}}{{- end -}}
{{- $_ := set $seen (toString $value) .name -}}
{{- end -}}
{{- if gt (len $seen) 1 -}}
{{- fail (printf "workers: config.%s differs between %s%s, so they never pair; auto follows config.goal" $key
  (values $seen | sortAlpha | join " and ") $of) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (dict "at" "model.path" "path" TEXT) */}}
{{- define "millrace.checkFolder" -}}
{{- if regexMatch "(^|/)\\.\\.(/|$)" (default "" .path) -}}
{{- fail (printf "%s: %s must not have .. in it" .at .path) -}}
{{- end -}}
{{- end -}}

{{/* (dict "name" "model" "model" {...}) */}}
{{- define "millrace.checkModel" -}}
{{- $model := .model -}}
{{- $at := .name -}}
{{- range $key := list "path" "hostPath" -}}
{{- include "millrace.checkFolder" (dict "at" (print $at "." $key) "path" (index $model $key)) -}}
{{- end -}}
{{- if regexMatch "^https?://" (default "" $model.uri) -}}
{{- fail (printf "%s.uri: %s must not begin with http:// or https://" $at $model.uri) -}}
{{- end -}}
{{- if and (has $model.source (list "pvc" "hf" "s3" "oci")) (not $model.claim) -}}
{{- fail (printf "%s.claim: required with model.source=%s" $at $model.source) -}}
{{- end -}}
{{- if and (has $model.source (list "hf" "s3" "oci")) (or (not $model.uri) (not $model.path)) -}}
{{- fail (printf "%s.uri, %s.path: required with model.source=%s" $at $at $model.source) -}}
{{- end -}}
{{- if and (eq $model.source "s3") (not (hasPrefix "s3://" $model.uri)) -}}
{{- fail (printf "%s.uri: %s is not s3://bucket/prefix" $at $model.uri) -}}
{{- end -}}
{{- if and (eq $model.source "hf") (not (regexMatch "^[A-Za-z0-9][-A-Za-z0-9._]*/[A-Za-z0-9][-A-Za-z0-9._]*$" $model.uri)) -}}
{{- fail (printf "%s.uri: %s is not owner/name" $at $model.uri) -}}
{{- end -}}
{{- if and (eq $model.source "hostPath") (not $model.hostPath) -}}
{{- fail (printf "%s.hostPath: required with model.source=hostPath" $at) -}}
{{- end -}}
{{- if and (eq $model.source "image") (not $model.path) -}}
{{- fail (printf "%s.path: required with model.source=image" $at) -}}
{{- end -}}
{{- end -}}

{{/* pool: a folder that pods cannot write to, or that is the container's own and ends with it, helps nobody */}}
{{- define "millrace.checkDisk" -}}
{{- $at := printf "workers.%s.diskCache" .name -}}
{{- $disk := .diskCache -}}
{{- $mounted := false -}}
{{- range .extraVolumeMounts -}}
{{- if hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) (print $.diskFolder "/") -}}{{- $mounted = true -}}{{- end -}}
{{- end -}}
{{- if and .diskFolder (not $disk.kind) (not $mounted) -}}
{{- fail (printf "%s.kind: required with config.limits.disk_cache=%s (emptyDir, hostPath or pvc), or an extraVolumeMounts that has it" $at .diskFolder) -}}
{{- end -}}
{{- if and .diskFolder (not (hasPrefix "/" .diskFolder)) -}}
{{- fail (printf "workers.%s.config.limits.disk_cache: %s is no absolute path" .name .diskFolder) -}}
{{- end -}}
{{- if and (not .diskFolder) $disk.kind -}}
{{- fail (printf "%s.kind: %s needs config.limits.disk_cache, the folder where it is mounted" $at $disk.kind) -}}
{{- end -}}
{{- $storage := get (default dict .resources.limits) "ephemeral-storage" -}}
{{- if and (eq $disk.kind "emptyDir") $storage (ge (include "millrace.bytes" $disk.size | int64) (include
  "millrace.bytes" $storage | int64)) -}}
{{- fail (printf "%s.size: %s is not below resources.limits.ephemeral-storage %s, which it counts towards" $at (include
  "millrace.text" $disk.size) (include "millrace.text" $storage)) -}}
{{- end -}}
{{- if and (eq $disk.kind "pvc") (not $disk.claim) -}}
{{- fail (printf "%s.claim: required with kind=pvc" $at) -}}
{{- end -}}
{{- include "millrace.checkFolder" (dict "at" (print $at ".hostPath") "path" $disk.hostPath) -}}
{{- if and (eq $disk.kind "hostPath") (not $disk.hostPath) -}}
{{- fail (printf "%s.hostPath: required with kind=hostPath" $at) -}}
{{- end -}}
{{- end -}}

{{/* Folders of nodes belong to root, so pods give them to their user */}}
{{- define "millrace.checkOwner" -}}
{{- $security := .Values.podSecurity -}}
{{- $at := ternary (list "cache") list (eq .Values.cache.kind "hostPath") -}}
{{- range include "millrace.pools" . | fromJson -}}
{{- if eq .diskCache.kind "hostPath" -}}{{- $at = append $at (printf "workers.%s.diskCache" .name) -}}{{- end -}}
{{- end -}}
{{- if and $at (not (and $security.runAsUser $security.fsGroup)) -}}
{{- fail (printf "podSecurity.runAsUser, podSecurity.fsGroup: required with %s.kind=hostPath, whose folder they own" (first $at)) -}}
{{- end -}}
{{- end -}}

{{- define "millrace.checkCache" -}}
{{- $cache := .Values.cache -}}
{{- if and $cache.warm (ne $cache.kind "pvc") -}}
{{- fail (printf "cache.warm: needs cache.kind=pvc, not %s: a job fills the cache of its own node only" $cache.kind) -}}
{{- end -}}
{{- if and (eq $cache.kind "pvc") (not $cache.claim) -}}
{{- fail "cache.claim: required with cache.kind=pvc" -}}
{{- end -}}
{{- include "millrace.checkFolder" (dict "at" "cache.hostPath" "path" $cache.hostPath) -}}
{{- if and (eq $cache.kind "hostPath") (not $cache.hostPath) -}}
{{- fail "cache.hostPath: required with cache.kind=hostPath" -}}
{{- end -}}
{{- end -}}

{{/* router.service -> its ports of nodes by name, as JSON */}}
{{- define "millrace.nodePorts" -}}
{{- $ports := dict -}}
{{- range $name, $port := merge (pick (default dict .spec) "healthCheckNodePort") .nodePorts -}}
{{- if $port -}}{{- $_ := set $ports $name $port -}}{{- end -}}
{{- end -}}
{{- toJson $ports -}}
{{- end -}}

{{/* router.service: fields that an API server refuses with its type, and ports of nodes, each of which is for one thing */}}
{{- define "millrace.checkService" -}}
{{- include "millrace.checkPorts" (dict "name" "router.service.nodePorts" "ports" (include "millrace.nodePorts" . | fromJson)) -}}
{{- if eq .type "ClusterIP" -}}
{{- if or .nodePorts.grpc .nodePorts.http -}}
{{- fail "router.service.nodePorts: needs type NodePort or LoadBalancer, not ClusterIP" -}}
{{- end -}}
{{- range $key := list "externalTrafficPolicy" "healthCheckNodePort" -}}
{{- if hasKey (default dict $.spec) $key -}}
{{- fail (printf "router.service.spec.%s: needs type NodePort or LoadBalancer, not ClusterIP" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $key, $_ := (default dict .spec) -}}
{{- if and (ne $.type "LoadBalancer") (or (hasPrefix "loadBalancer" $key) (eq $key "allocateLoadBalancerNodePorts")) -}}
{{- fail (printf "router.service.spec.%s: needs type LoadBalancer, not %s" $key $.type) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What a download asks for, by its values, must be open to it. `more` may open any port */}}
{{- define "millrace.checkEgress" -}}
{{- $egress := .Values.networkPolicy.egress -}}
{{- $open := list -}}
{{- range $egress.downloadPorts -}}{{- $open = append $open (int .) -}}{{- end -}}
{{- $asked := dict -}}
{{- $models := dict "model.uri" .Values.model -}}
{{- range include "millrace.pools" . | fromJson -}}{{- $_ := set $models (printf "workers.%s.model.uri" .name) .model -}}{{- end -}}
{{- range $at, $model := $models -}}
{{- if eq $model.source "oci" -}}{{- $_ := set $asked $at $model.uri -}}{{- end -}}
{{- if include "millrace.downloads" $model -}}
{{- range $name, $url := $.Values.jobs.env -}}
{{- if regexMatch "^https?://" (toString $url) -}}{{- $_ := set $asked (print "jobs.env." $name) $url -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $at, $url := $asked -}}
{{- $usual := ternary "80" "443" (hasPrefix "http://" $url) -}}
{{- $host := regexFind "^[^/]*" (regexReplaceAll "^https?://" $url "") -}}
{{- $port := regexFind ":[0-9]+$" $host | trimPrefix ":" | default $usual | int -}}
{{- if not (or (has $port $open) $egress.more) -}}
{{- fail (printf "networkPolicy.egress.downloadPorts: lacks %d, the port of %s=%s" $port $at $url) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (dict "at" "networkPolicy.clients" "ranges" [...]) */}}
{{- define "millrace.checkRanges" -}}
{{- range .ranges -}}
{{- if not (regexMatch "^([0-9]{1,3}([.][0-9]{1,3}){3}/([12]?[0-9]|3[0-2])|[0-9a-fA-F:]*:[0-9a-fA-F:.]*/([1-9]?[0-9]|1[01][0-9]|12[0-8]))$" (toString .)) -}}
{{- fail (printf "%s: %v is no range of addresses, as in 10.0.0.0/8" $.at .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Ranges in all policies, and of the load balancer */}}
{{- define "millrace.checkAddresses" -}}
{{- $policy := .Values.networkPolicy -}}
{{- $peers := dict "clients" $policy.clients "monitoring" $policy.monitoring "egress.apiServer" $policy.egress.apiServer "egress.download"
  $policy.egress.download -}}
{{- range $index, $rule := $policy.egress.more -}}{{- $_ := set $peers (printf "egress.more[%d].to" $index) $rule.to -}}{{- end -}}
{{- range $at, $list := $peers -}}
{{- range $list -}}
{{- with .ipBlock -}}
{{- include "millrace.checkRanges" (dict "at" (print "networkPolicy." $at) "ranges" (prepend (default list .except) .cidr)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "millrace.checkRanges" (dict "at" "router.service.spec.loadBalancerSourceRanges" "ranges" (default dict
  .Values.router.service.spec).loadBalancerSourceRanges) -}}
{{- end -}}

{{/* Values that would be ignored where the one that they need is off. [value, its name, what it needs, whether that is so] */}}
{{- define "millrace.checkIdle" -}}
{{- $tls := .Values.tls -}}
{{- $policy := .Values.networkPolicy -}}
{{- $gateway := .Values.gateway.backendTLS -}}
{{- $gpus := false -}}
{{- range include "millrace.pools" . | fromJson -}}{{- if gt (int .gpus) 0 -}}{{- $gpus = true -}}{{- end -}}{{- end -}}
{{- range list
  (list $tls.issuerRef "tls.issuerRef" "tls.mode certManager" (eq $tls.mode "certManager"))
  (list $tls.routerSecret "tls.routerSecret" "tls.mode secrets" (eq $tls.mode "secrets"))
  (list $tls.workerSecret "tls.workerSecret" "tls.mode secrets" (eq $tls.mode "secrets"))
  (list $policy.clients "networkPolicy.clients" "networkPolicy.enabled" $policy.enabled)
  (list $policy.monitoring "networkPolicy.monitoring" "networkPolicy.enabled" $policy.enabled)
  (list $policy.egress.apiServer "networkPolicy.egress.apiServer" "networkPolicy.egress.enabled" $policy.egress.enabled)
  (list $policy.egress.download "networkPolicy.egress.download" "networkPolicy.egress.enabled" $policy.egress.enabled)
  (list $policy.egress.more "networkPolicy.egress.more" "networkPolicy.egress.enabled" $policy.egress.enabled)
  (list $gateway.hostname "gateway.backendTLS.hostname" "gateway.backendTLS.kind policy" (eq $gateway.kind "policy"))
  (list $gateway.caConfigMap "gateway.backendTLS.caConfigMap" "gateway.backendTLS.kind policy" (eq $gateway.kind "policy"))
  (list .Values.serviceAccount.annotations "serviceAccount.annotations" "serviceAccount.create" .Values.serviceAccount.create)
  (list .Values.cache.warm "cache.warm" "a pool with GPUs" $gpus) -}}
{{- if and (index . 0) (not (index . 3)) -}}
{{- fail (printf "%s: needs %s" (index . 1) (index . 2)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "millrace.checks" -}}
{{- $full := include "millrace.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full) -}}
{{- fail (printf "fullnameOverride: required, because Services cannot be called %s-router: a name begins with a letter and has no dot" $full) -}}
{{- end -}}
{{- include "millrace.checkPairs" . -}}
{{- include "millrace.checkModel" (dict "name" "model" "model" .Values.model) -}}
{{- include "millrace.checkCache" . -}}
{{- include "millrace.checkOwner" . -}}
{{- include "millrace.checkPorts" (dict "name" "router.ports" "ports" .Values.router.ports) -}}
{{- include "millrace.checkResources" (dict "name" "router" "resources" .Values.router.resources) -}}
{{- include "millrace.checkResources" (dict "name" "jobs" "resources" .Values.jobs.resources) -}}
{{- include "millrace.checkResources" (dict "name" "test" "resources" .Values.test.resources) -}}
{{- include "millrace.checkTolerations" (dict "at" "test" "tolerations" .Values.test.scheduling.tolerations) -}}
{{- include "millrace.checkGrace" (dict "name" "router" "values" .Values.router) -}}
{{- include "millrace.checkScaling" (dict "name" "router" "values" .Values.router) -}}
{{- include "millrace.checkMetadata" . -}}
{{- include "millrace.checkIdle" . -}}
{{- include "millrace.checkAddresses" . -}}
{{- if not (has .Values.podSecurity.seccompProfile.type (list "RuntimeDefault" "Unconfined" "Localhost")) -}}
{{- fail (printf "podSecurity.seccompProfile.type: %v is none of RuntimeDefault, Unconfined, Localhost" .Values.podSecurity.seccompProfile.type) -}}
{{- end -}}
{{- include "millrace.checkSelector" (dict "at" "router" "kind" "Deployment" "name" (print $full "-router") "root" . "component" "router") -}}
{{- if and (eq .Values.router.autoscaling.kind "hpa") (not (dig "requests" "cpu" "" .Values.router.resources)) -}}
{{- fail "router.resources.requests.cpu: required with router.autoscaling.kind=hpa, which scales by a share of it" -}}
{{- end -}}
{{- include "millrace.checkService" .Values.router.service -}}
{{- range include "millrace.pools" . | fromJson -}}
{{- include "millrace.checkPool" (dict "root" $ "pool" .) -}}
{{- include "millrace.checkModel" (dict "name" (printf "workers.%s.model" .name) "model" .model) -}}
{{- end -}}
{{- include "millrace.checkFabric" . -}}
{{- if and (eq .Values.tls.mode "secrets") (or (not .Values.tls.routerSecret) (not .Values.tls.workerSecret)) -}}
{{- fail "tls.routerSecret, tls.workerSecret: required with tls.mode=secrets" -}}
{{- end -}}
{{- if and .Values.tls.publicSecret (eq .Values.tls.mode "off") -}}
{{- fail "tls.publicSecret: needs tls.mode generated, certManager or secrets" -}}
{{- end -}}
{{- if and .Values.networkPolicy.egress.enabled (not .Values.networkPolicy.enabled) -}}
{{- fail "networkPolicy.egress.enabled: needs networkPolicy.enabled" -}}
{{- end -}}
{{- if .Values.networkPolicy.egress.enabled -}}{{- include "millrace.checkEgress" . -}}{{- end -}}
{{- $host := .Values.router.adminHost -}}
{{- if not (regexMatch "^(127[.][0-9.]+|\\[::1\\]|localhost)$" $host) -}}
{{- if .Values.router.hostNetwork -}}
{{- fail (printf "router.adminHost: %s with router.hostNetwork would give the admin ports to the node's network; only 127.0.0.1 or [::1]" $host) -}}
{{- end -}}
{{- if eq .Values.tls.mode "off" -}}
{{- fail (printf "router.adminHost: %s needs tls.mode: the token that opens admin ports would travel in plain text" $host) -}}
{{- end -}}
{{- end -}}
{{- include "millrace.checkGateway" . -}}
{{- if and .Values.apiKeys.secretName (eq .Values.tls.mode "off") (not .Values.apiKeys.allowPlaintext) -}}
{{- fail "apiKeys.secretName: needs tls.mode generated, certManager or secrets, or clients send their keys in plain text; if a Gateway or a mesh encrypts them up to the routers, set apiKeys.allowPlaintext=true" -}}
{{- end -}}
{{- if and .Values.apiKeys.secretName (not .Values.test.apiKey.secretName) -}}
{{- fail "test.apiKey.secretName: required with apiKeys, or helm test is refused" -}}
{{- end -}}
{{- end -}}
