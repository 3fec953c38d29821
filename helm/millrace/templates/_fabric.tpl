{{/* (dict "root" $ "pool" $pool) -> what the pool's fabric asks for, as JSON; {} on CPU:
     {"resources": {...}, "annotations": {...}, "env": {...}, "capabilities": [...], "nics": 8, "devices": "mlx5_", ...} */}}
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
{{- $nics := ternary 0 (mul $gpus (default 1 $preset.nicsPerGpu)) (default false $preset.tcp) -}}
{{- dict
  "resources" (ternary $resources $own.resources (kindIs "invalid" $own.resources))
  "annotations" (mustMerge (deepCopy $own.annotations) (default dict $preset.annotations))
  "env" (mustMerge (deepCopy $own.env) (default dict $preset.env))
  "capabilities" (default list $preset.capabilities)
  "nics" (ternary $nics (int $own.nics) (or (eq (int $own.nics) 0) (default false $preset.tcp)))
  "devices" (default "" $preset.devices)
  "link" (default "" $preset.link)
  "apart" (default false $preset.apart)
  "tcp" (default false $preset.tcp)
  | toJson -}}
{{- end -}}
{{- end -}}
