{{/* Pods of jobs. Nothing in them changes with the chart's version, because their templates cannot be changed. */}}

{{/* weight -> annotations of what is done before anything else is installed or upgraded */}}
{{- define "millrace.beforeInstall" -}}
helm.sh/hook: pre-install,pre-upgrade
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation
{{- end -}}

{{/* of a model */}}
{{- define "millrace.downloadEnv" -}}
- {name: HOME, value: /tmp}
- {name: HF_HOME, value: /tmp/hf}
{{- if eq .source "oci" }}
- {name: DOCKER_CONFIG, value: /etc/docker}
{{- end }}
- {name: URI, value: {{ .uri | quote }}}
- {name: REVISION, value: {{ .revision | quote }}}
- {name: FOLDER, value: {{ include "millrace.modelPath" . | quote }}}
{{- end -}}

{{/* (dict "root" $ "model" {...}) */}}
{{- define "millrace.downloadPod" -}}
{{- $model := .model }}
{{- $jobs := .root.Values.jobs }}
{{- $image := include "millrace.downloadImage" . | fromJson }}
{{- $commands := dict
  "hf" "hf download \"$URI\" ${REVISION:+--revision \"$REVISION\"} --local-dir \"$FOLDER\""
  "s3" "aws s3 sync --no-progress \"$URI\" \"$FOLDER\""
  "oci" "oras pull --output \"$FOLDER\" \"$URI\"" }}
{{- $as := dict "root" .root "component" "download" }}
{{- $trust := dict }}
{{- if $jobs.caBundle.configMapName }}
{{- range list "SSL_CERT_FILE" "REQUESTS_CA_BUNDLE" "AWS_CA_BUNDLE" }}{{ $_ := set $trust . "/etc/millrace/ca/ca.crt" }}{{ end }}
{{- end -}}
metadata:
  {{- include "millrace.podMeta" (merge (dict "labels" $jobs.podLabels "annotations" $jobs.podAnnotations) $as) | nindent 2 }}
spec:
  restartPolicy: OnFailure
  automountServiceAccountToken: false
  {{- with $jobs.serviceAccountName }}
  serviceAccountName: {{ . | quote }}
  {{- end }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets: {{ toJson . }}
  {{- end }}
  securityContext:
    {{- include "millrace.podSecurity" (dict "root" .root) | nindent 4 }}
  {{- include "millrace.scheduling" (merge (dict "scheduling" $jobs.scheduling) $as) | nindent 2 }}
  containers:
    - name: download
      image: {{ $image.reference }}
      imagePullPolicy: {{ $image.pullPolicy }}
      command:
        - /bin/sh
        - -ec
        - |
          mkdir -p "$FOLDER"
          marker="$FOLDER/.millrace-complete" wanted="$URI${REVISION:+ at $REVISION}" found=
          if [ -e "$marker" ]; then
            read -r found <"$marker" || true # empty: an earlier chart left it
            [ "${found:-$wanted}" = "$wanted" ] && exit
            echo "$FOLDER has $found: give another model.path for $wanted"
            exit 1
          fi
          {{ index $commands $model.source }}
          echo "$wanted" >"$marker"
      env:
        {{- $own := include "millrace.downloadEnv" $model }}
        {{- $own | nindent 8 }}
        {{- include "millrace.env" (dict "at" "jobs" "own" $own "env" (include "millrace.variables" (list $trust $jobs.env) | fromJson)) | nindent 8 }}
      {{- if and $model.secretName (ne $model.source "oci") }}
      envFrom: [{secretRef: {name: {{ $model.secretName | quote }}}}]
      {{- end }}
      securityContext:
        {{- include "millrace.containerSecurity" . | nindent 8 }}
      resources: {{ toJson $jobs.resources }}
      volumeMounts:
        - {name: model, mountPath: /models}
        - {name: tmp, mountPath: /tmp}
        {{- if and $model.secretName (eq $model.source "oci") }}
        - {name: registry, mountPath: /etc/docker, readOnly: true}
        {{- end }}
        {{- if $trust }}
        - {name: ca, mountPath: /etc/millrace/ca, readOnly: true}
        {{- end }}
        {{- with $jobs.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: model
      persistentVolumeClaim: {claimName: {{ $model.claim | quote }}}
    - name: tmp
      emptyDir: {sizeLimit: 16Gi}
    {{- if and $model.secretName (eq $model.source "oci") }}
    - name: registry
      secret: {secretName: {{ $model.secretName | quote }}, items: [{key: .dockerconfigjson, path: config.json}]}
    {{- end }}
    {{- with $jobs.caBundle.configMapName }}
    - name: ca
      configMap: {name: {{ . | quote }}, items: [{key: {{ $jobs.caBundle.key | quote }}, path: ca.crt}]}
    {{- end }}
    {{- with $jobs.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* (dict "root" $ "pool" $pool) -> the pool as a job that warms its cache has it, as JSON: with what `jobs` gives to all of them.
     Where both give one thing, `jobs` wins, but for the account: a model's volume may need the pool's */}}
{{- define "millrace.warmPool" -}}
{{- $jobs := .root.Values.jobs -}}
{{- $made := dict "kind" "deployment" "serviceAccountName" (default $jobs.serviceAccountName .pool.serviceAccountName) -}}
{{- range list "env" "podLabels" "podAnnotations" -}}
{{- $_ := set $made . (include "millrace.variables" (list (index $.pool .) (index $jobs .)) | fromJson) -}}
{{- end -}}
{{- range list "extraVolumes" "extraVolumeMounts" -}}
{{- $_ := set $made . (concat (default list (index $.pool .)) (default list (index $jobs .)) | uniq) -}}
{{- end -}}
{{- merge $made (omit .pool "env") | toJson -}}
{{- end -}}

{{/* (dict "root" $ "pool" $pool) -> starts the ranks of a worker once, on the devices and with the configuration of the pool,
     and leaves what they have compiled. Its pod is the worker's without extraContainers, beside which a job would never end */}}
{{- define "millrace.warmPod" -}}
{{- $root := .root }}
{{- $pool := .pool }}
{{- $as := dict "root" $root "component" "warm" "pool" $pool }}
{{- $fabric := include "millrace.fabric" . | fromJson }}
{{- $security := include "millrace.workerSecurity" (dict "root" $root "fabric" $fabric) -}}
metadata:
  {{- include "millrace.workerMeta" $as | nindent 2 }}
spec:
  restartPolicy: OnFailure
  {{- include "millrace.podHead" (dict "root" $root "values" $pool "grace" 30 "serviceAccount" $pool.serviceAccountName) | nindent 2 }}
  automountServiceAccountToken: false
  securityContext:
    {{- include "millrace.podSecurity" (dict "root" $root "asRoot" $root.Values.podSecurity.workersAsRoot) | nindent 4 }}
  {{- include "millrace.workerScheduling" $as | nindent 2 }}
  {{- with $pool.extraInitContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: compile
      image: {{ $pool.image.reference }}
      imagePullPolicy: {{ $pool.image.pullPolicy }}
      command: [millrace, compile, --config, /etc/millrace/config/config.yaml, --model, {{ $pool.modelPath | quote }}]
      env:
        {{- include "millrace.workerEnv" . | nindent 8 }}
      {{- with $pool.envFrom }}
      envFrom: {{ toJson . }}
      {{- end }}
      securityContext:
        {{- $security | nindent 8 }}
      resources: {{- include "millrace.workerResources" . | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/millrace/config, readOnly: true}
        - {name: run, mountPath: /run/millrace}
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        {{- include "millrace.deviceMounts" . | nindent 8 }}
        {{- include "millrace.modelMount" $pool.model | nindent 8 }}
  volumes:
    - name: config
      configMap: {name: {{ $pool.fullname }}-warm}
    {{- include "millrace.deviceVolumes" . | nindent 4 }}
    {{- include "millrace.modelVolume" $pool.model | nindent 4 }}
{{- end -}}
