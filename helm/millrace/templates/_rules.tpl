{{/* Whether monitors and rules are made: `auto` looks whether the cluster has their CRDs, so that an install does not fail */}}
{{- define "millrace.monitored" -}}
{{- $enabled := .Values.monitoring.enabled -}}
{{- if or (eq (toString $enabled) "true") (and (eq (toString $enabled) "auto") (.Capabilities.APIVersions.Has
  "monitoring.coreos.com/v1")) -}}true{{- end -}}
{{- end -}}

{{/* The rules of files/alerts.yaml that are for this release, as YAML {"groups": [...]}. */}}
{{- define "millrace.rules" -}}
{{- $monitoring := .Values.monitoring -}}
{{- $model := .Values.model.name | replace "\\" "\\\\" | replace "\"" "\\\"" -}}
{{- $runbooks := trimSuffix "/" (default "" $monitoring.runbooks) -}}
{{- $grafana := trimSuffix "/" (default "" $monitoring.grafana) -}}
{{- $startup := 0 -}}
{{- $rdma := false -}}
{{- range include "millrace.pools" . | fromJson -}}
{{- $startup = max $startup (int .startup) -}}
{{- if and (gt (int .gpus) 0) (ne .role "unified") -}}{{- $rdma = true -}}{{- end -}}
{{- end -}}
{{- $off := default list $monitoring.disabledAlerts -}}
{{- if or (not $rdma) (has .Values.fabric.preset (list "tcp-dev" "aws-efa")) -}}
{{- $off = append $off "MillraceKvSlow" -}}
{{- end -}}
{{- $known := list -}}
{{- $groups := list -}}
{{- range (.Files.Get "files/alerts.yaml" | fromYaml).groups -}}
{{- $rules := list -}}
{{- range .rules -}}
{{- $alert := default "" .alert -}}
{{- $known = append $known $alert -}}
{{- if not (has $alert $off) -}}
{{- $_ := set . "expr" (.expr | replace "__NAMESPACE__" $.Release.Namespace | replace "__MODEL__" $model | replace
  "__RELEASE__" $.Release.Name) -}}
{{- if $alert -}}
{{- $links := dict "runbook_url" (printf "%s/%s.md" $runbooks $alert) "dashboard_url" (print $grafana
  .annotations.dashboard_url) -}}
{{- if not $runbooks -}}{{- $_ := unset $links "runbook_url" -}}{{- end -}}
{{- if not $grafana -}}{{- $_ := unset $links "dashboard_url" -}}{{- end -}}
{{- $_ := set . "annotations" (merge $links (pick .annotations "summary")) -}}
{{- end -}}
{{- if eq $alert "MillraceWorkerNotReady" -}}{{- $_ := set . "for" (printf "%ds" $startup) -}}{{- end -}}
{{- $rules = append $rules . -}}
{{- end -}}
{{- end -}}
{{- $wanted := dict "millrace-gpus" $monitoring.dcgm "millrace-vllm-names" $monitoring.vllmNames -}}
{{- if and $rules (or (not (hasKey $wanted .name)) (get $wanted .name)) -}}
{{- $groups = append $groups (dict "name" .name "rules" $rules) -}}
{{- end -}}
{{- end -}}
{{- range $monitoring.disabledAlerts -}}
{{- if not (has . $known) -}}
{{- fail (printf "monitoring.disabledAlerts: there is no alert %s" .) -}}
{{- end -}}
{{- end -}}
{{- dict "groups" $groups | toYaml -}}
{{- end -}}
