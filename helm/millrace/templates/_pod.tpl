{{/* Parts of pods that routers and workers share. */}}

{{- define "millrace.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int .Values.podSecurity.runAsUser }}
runAsGroup: {{ int .Values.podSecurity.runAsUser }}
fsGroup: {{ int .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {{ toJson .Values.podSecurity.seccompProfile }}
{{- end -}}

{{- define "millrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* (dict "port" 9091 "startup" 60 "startupService" "liveness"): of grpc.health.v1 on the plain health port. `liveness` is
     the process alone: a busy device or a lost peer restarts nobody. Readiness is the empty service name. */}}
{{- define "millrace.probes" -}}
startupProbe:
  grpc: {port: {{ int .port }}, service: {{ .startupService | quote }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div (add (int .startup) 4) 5 }}
livenessProbe:
  grpc: {port: {{ int .port }}, service: liveness}
  periodSeconds: 15
  timeoutSeconds: 5
  failureThreshold: 4
readinessProbe:
  grpc: {port: {{ int .port }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- end -}}

{{- define "millrace.env" -}}
{{- range $name, $value := . }}
- {name: {{ $name }}, value: {{ toString $value | quote }}}
{{- end }}
{{- end -}}

{{- define "millrace.ownEnv" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: HOME, value: /tmp}
- {name: MILLRACE_RUN, value: /run/millrace}
{{- end -}}

{{/* (dict "root" $ "scheduling" ... "component" "router" "pool" "" "affinity" {...}) */}}
{{- define "millrace.scheduling" -}}
{{- with .scheduling.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .scheduling.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .scheduling.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .scheduling.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .scheduling.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- $selector := include "millrace.selector" . | fromYaml }}
{{- with .scheduling.spread }}
topologySpreadConstraints:
  {{- range . }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector: {matchLabels: {{ toJson $selector }}}
  {{- end }}
{{- end }}
{{- with default .affinity .scheduling.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "image" ... "args" [...] "security" TEXT "resources" {...} "mounts" TEXT): waits in here until the pod
     can work */}}
{{- define "millrace.preflight" -}}
- name: preflight
  image: {{ include "millrace.image" . }}
  imagePullPolicy: {{ .image.pullPolicy }}
  command: [python3, /etc/millrace/config/preflight.py, --model, {{ include "millrace.modelPath" .root }}]
  args: {{ toJson .args }}
  securityContext:
    {{- .security | nindent 4 }}
  {{- with .resources }}
  resources: {{ toJson . }}
  {{- end }}
  volumeMounts:
    - {name: config, mountPath: /etc/millrace/config, readOnly: true}
    - {name: run, mountPath: /run/millrace}
    {{- include "millrace.modelMount" .root | nindent 4 }}
    {{- with .mounts }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end -}}
