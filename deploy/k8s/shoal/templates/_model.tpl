{{/*
Where a part's model comes from. All take a context (_parts.tpl); a gateway that does not decode
has no `model` there, and gets nothing.

  embedded   in the image
  hub        downloaded by each pod into its cache; or, with downloadJob, by one Job into a claim
             that the pods mount read-only, so that they need neither network nor token
  pvc        on a volume
  image      in an image, mounted by the kubelet
*/}}

{{- define "shoal.modelArgs" -}}
{{- with .model }}
{{- if eq .source "hub" }}
- {{ printf "--model=%s" .hub.id | quote }}
{{- else if eq .source "pvc" }}
- {{ printf "--model=/models/%s" (trimPrefix "/" .pvc.path) | quote }}
{{- else if eq .source "image" }}
- {{ printf "--model=/models/%s" (trimPrefix "/" .image.path) | quote }}
{{- end }}
{{- if and .servedName (ne $.service "gateway") }}
- {{ printf "--served-model-name=%s" .servedName | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Whether the pods themselves download: "true" or empty. */}}
{{- define "shoal.downloads" -}}
{{- with .model }}{{ if and (eq .source "hub") (not .hub.downloadJob) }}true{{ end }}{{ end -}}
{{- end -}}

{{/* Whether the pods wait for a Job that downloads: "true" or empty. */}}
{{- define "shoal.awaitsDownload" -}}
{{- with .model }}{{ if and (eq .source "hub") .hub.downloadJob }}true{{ end }}{{ end -}}
{{- end -}}

{{- define "shoal.modelEnv" -}}
{{- with .model }}
{{- if eq .source "hub" }}
- name: HF_HOME
  value: /var/cache/huggingface
{{- end }}
{{- if include "shoal.downloads" $ }}
{{- include "shoal.hubEnv" $ }}
{{- else }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- end }}
{{- end -}}

{{/* What a download needs to know. */}}
{{- define "shoal.hubEnv" -}}
{{- with .model.hub.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- with .model.hub.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .name }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "shoal.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
{{- include "shoal.securityMounts" . }}
{{- with .model }}
{{- if eq .source "hub" }}
- name: hub-cache
  mountPath: /var/cache/huggingface
  {{- if include "shoal.awaitsDownload" $ }}
  readOnly: true
  {{- end }}
{{- else if ne .source "embedded" }}
- name: model
  mountPath: /models
  readOnly: true
{{- end }}
{{- end }}
{{- end -}}

{{/* The claim that keeps what was downloaded; empty if there is none. */}}
{{- define "shoal.cacheClaim" -}}
{{- with .model.hub.cache -}}
{{- if .existingClaim -}}
{{- .existingClaim -}}
{{- else if .create -}}
{{- include "shoal.name" (dict "root" $.root "service" "hub-cache" "part" $.model.key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "shoal.volumes" -}}
- name: tmp
  emptyDir: {}
{{- include "shoal.securityVolumes" . }}
{{- with .model }}
{{- if eq .source "hub" }}
- name: hub-cache
  {{- $claim := include "shoal.cacheClaim" $ }}
  {{- if include "shoal.awaitsDownload" $ }}
  persistentVolumeClaim:
    claimName: {{ $claim }}
    readOnly: true
  {{- else if and $claim (eq $.service "worker") }}
  persistentVolumeClaim:
    claimName: {{ $claim }}
  {{- else if eq $.service "worker" }}
  emptyDir:
    sizeLimit: {{ .hub.cache.size }}
  {{- else }}
  # What has no weights downloads a few small files.
  emptyDir: {}
  {{- end }}
{{- else if eq .source "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .pvc.claimName }}
    readOnly: true
{{- else if eq .source "image" }}
- name: model
  image:
    reference: {{ .image.reference }}
    pullPolicy: {{ .image.pullPolicy }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The file by which the Job tells that the model is there; another model has another. */}}
{{- define "shoal.downloadMark" -}}
{{- printf "/var/cache/huggingface/shoal-%s" (printf "%s %s" .model.hub.endpoint .model.hub.id | sha256sum | trunc 16) -}}
{{- end -}}

{{/* Holds a pod's start until its model is on the volume. */}}
{{- define "shoal.initContainers" -}}
{{- if include "shoal.awaitsDownload" . }}
initContainers:
  - name: wait-for-model
    image: {{ include "shoal.image" . }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    securityContext:
      {{- toYaml .root.Values.containerSecurityContext | nindent 6 }}
    command: [sh, -c, 'until test -e "$1"; do sleep 2; done', wait, {{ include "shoal.downloadMark" . | quote }}]
    resources:
      requests: {cpu: 10m, memory: 16Mi}
      limits: {memory: 16Mi}
    volumeMounts:
      - name: hub-cache
        mountPath: /var/cache/huggingface
        readOnly: true
{{- end }}
{{- end -}}

{{/* The pod that downloads a model with its weights to the claim, and leaves the mark. */}}
{{- define "shoal.downloadPod" -}}
metadata:
  labels:
    {{- include "shoal.selectorLabels" (dict "root" .root "service" "download" "part" .model.key) | nindent 4 }}
spec:
  restartPolicy: OnFailure
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    {{- toYaml .root.Values.podSecurityContext | nindent 4 }}
  {{- include "shoal.pullSecrets" .root | nindent 2 }}
  containers:
    - name: download
      image: {{ include "shoal.image" . }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      securityContext:
        {{- toYaml .root.Values.containerSecurityContext | nindent 8 }}
      args:
        - download
        - {{ printf "--model=%s" .model.hub.id | quote }}
        - {{ include "shoal.downloadMark" . | printf "--mark=%s" | quote }}
      env:
        - {name: HF_HOME, value: /var/cache/huggingface}
        {{- include "shoal.hubEnv" . | nindent 8 }}
      resources:
        requests: {cpu: 500m, memory: 512Mi}
        limits: {memory: 2Gi}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: hub-cache, mountPath: /var/cache/huggingface}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: hub-cache
      persistentVolumeClaim:
        claimName: {{ include "shoal.cacheClaim" . }}
{{- end -}}
