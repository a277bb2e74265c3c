{{/* The parts of a pod that the services have in common. All take {root, service}. */}}

{{/* Metadata of a pod template. */}}
{{- define "shoal.podMetadata" -}}
{{- $values := index .root.Values .service -}}
{{- with $values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
# No chart version here: an upgrade that changes nothing else must not restart the fleet.
labels:
  {{- include "shoal.selectorLabels" . | nindent 2 }}
  app.kubernetes.io/part-of: shoal
  {{- with .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Everything of a pod's spec beside its containers and volumes. */}}
{{- define "shoal.podSpec" -}}
{{- $values := index .root.Values .service -}}
serviceAccountName: {{ include "shoal.name" . }}
automountServiceAccountToken: {{ and (eq .service "gateway") (eq .root.Values.discovery.type "kubernetes") }}
# Kubernetes would set SHOAL_..._PORT=tcp://... for every Service, in the namespace of our options.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "shoal.graceSeconds" .root }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .root.Values.topologySpread }}
{{- if .enabled }}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - topologyKey: {{ . }}
    maxSkew: {{ $.root.Values.topologySpread.maxSkew }}
    whenUnsatisfiable: {{ $.root.Values.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "shoal.selectorLabels" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* Image, security and the preStop hook of a container. */}}
{{- define "shoal.container" -}}
name: {{ .service }}
image: {{ include "shoal.image" . }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- toYaml .root.Values.containerSecurityContext | nindent 2 }}
lifecycle:
  preStop:
    exec:
      command: ["sleep", {{ include "shoal.preStopSeconds" .root | quote }}]
{{- end -}}

{{/* Flags that every service has, as a list. */}}
{{- define "shoal.commonArgs" -}}
- --drain-timeout={{ .root.Values.drainSeconds }}
- --log-level={{ .root.Values.log.level }}
- --log-format={{ .root.Values.log.format }}
{{- with .root.Values.tracing.otlpEndpoint }}
- {{ printf "--otlp-endpoint=%s" . | quote }}
{{- end }}
{{- end -}}

{{/*
What a pod proves itself with. The services behind the gateway listen with the internal
certificate and ask for one; the gateway shows it to them, and listens with the public one.
*/}}
{{- define "shoal.securityArgs" -}}
{{- $prefix := ternary "--peer-tls" "--tls" (eq .service "gateway") -}}
{{- if include "shoal.tlsSecret" (dict "root" .root "side" "internal") }}
- {{ $prefix }}-cert=/etc/shoal/internal-tls/tls.crt
- {{ $prefix }}-key=/etc/shoal/internal-tls/tls.key
- {{ $prefix }}-ca=/etc/shoal/internal-tls/ca.crt
{{- if eq .service "gateway" }}
- {{ printf "--peer-tls-server-name=%s" .root.Values.tls.internal.serverName | quote }}
{{- end }}
{{- end }}
{{- if eq .service "gateway" }}
{{- if include "shoal.tlsSecret" (dict "root" .root "side" "public") }}
- --tls-cert=/etc/shoal/public-tls/tls.crt
- --tls-key=/etc/shoal/public-tls/tls.key
{{- if .root.Values.tls.public.requireClientCertificates }}
- --tls-ca=/etc/shoal/public-tls/ca.crt
{{- end }}
{{- end }}
{{- if .root.Values.apiKeys.existingSecret }}
- --api-key-file=/etc/shoal/api-keys/keys
{{- end }}
{{- end }}
{{- end -}}

{{- define "shoal.securityMounts" -}}
{{- range $side := list "internal" "public" }}
{{- if and (or (eq $side "internal") (eq $.service "gateway")) (include "shoal.tlsSecret" (dict "root" $.root "side" $side)) }}
- name: {{ $side }}-tls
  mountPath: /etc/shoal/{{ $side }}-tls
  readOnly: true
{{- end }}
{{- end }}
{{- if and (eq .service "gateway") .root.Values.apiKeys.existingSecret }}
- name: api-keys
  mountPath: /etc/shoal/api-keys
  readOnly: true
{{- end }}
{{- end -}}

{{/* Mounted whole, so that a changed secret reaches the process, which reads it again. */}}
{{- define "shoal.securityVolumes" -}}
{{- range $side := list "internal" "public" }}
{{- $secret := include "shoal.tlsSecret" (dict "root" $.root "side" $side) }}
{{- if and $secret (or (eq $side "internal") (eq $.service "gateway")) }}
- name: {{ $side }}-tls
  secret:
    secretName: {{ $secret }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- if eq .service "gateway" }}
{{- with .root.Values.apiKeys }}
{{- if .existingSecret }}
- name: api-keys
  secret:
    secretName: {{ .existingSecret }}
    defaultMode: 0440
    items:
      - {key: {{ .key }}, path: keys}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The service's `config` as environment variables, and `extraEnv`. */}}
{{- define "shoal.configEnv" -}}
{{- $values := index .root.Values .service -}}
{{- range $name, $value := $values.config }}
- name: SHOAL_{{ snakecase $name | upper }}
  {{- /* Helm reads numbers as floats and would print large ones as 1e+06. */}}
  value: {{ if and (kindIs "float64" $value) (eq (floor $value) $value) }}{{ int64 $value | quote }}{{ else }}{{ $value | quote }}{{ end }}
{{- end }}
{{- with $values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
Probes of a service. They ask the admin port where TLS keeps the kubelet out of the others. Start-up and readiness ask whether the model is loaded and the engine
makes steps; liveness asks only whether the process is worth keeping, so that a pod that loads
or drains is not restarted.
*/}}
{{- define "shoal.probes" -}}
startupProbe:
  {{- include "shoal.readyCheck" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add (index .root.Values .service).startupSeconds 4) 5 }}
readinessProbe:
  {{- include "shoal.readyCheck" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  httpGet:
    path: /livez
    port: admin
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- define "shoal.readyCheck" -}}
{{- if eq .service "gateway" -}}
# Itself and not draining: a lost worker must not empty the Service.
httpGet:
  path: /readyz?scope=gateway
  port: admin
{{- else if and (eq .root.Values.probes.type "grpc") (not (include "shoal.tlsSecret" (dict "root" .root "side" "internal"))) -}}
grpc:
  port: 50051
{{- else -}}
httpGet:
  path: /readyz
  port: admin
{{- end -}}
{{- end -}}

{{/* Which model a service that reads its files is for, and its name. */}}
{{- define "shoal.modelArgs" -}}
{{- with .root.Values.model }}
{{- if eq .source "hub" }}
- {{ printf "--model=%s" .hub.id | quote }}
{{- else if eq .source "pvc" }}
- {{ printf "--model=/models/%s" (trimPrefix "/" .pvc.path) | quote }}
{{- end }}
{{- with .servedName }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "shoal.modelEnv" -}}
{{- with .root.Values.model }}
{{- if eq .source "hub" }}
- name: HF_HOME
  value: /var/cache/huggingface
{{- with .hub.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- if .hub.tokenSecret.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .hub.tokenSecret.name }}
      key: {{ .hub.tokenSecret.key }}
{{- end }}
{{- else }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- end }}
{{- end -}}

{{- define "shoal.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
{{- include "shoal.securityMounts" . }}
{{- if eq .root.Values.model.source "hub" }}
- name: hub-cache
  mountPath: /var/cache/huggingface
{{- else if eq .root.Values.model.source "pvc" }}
- name: model
  mountPath: /models
  readOnly: true
{{- end }}
{{- end -}}

{{/* Volumes. Only workers share a hub cache: the others download a few small files. */}}
{{- define "shoal.volumes" -}}
- name: tmp
  emptyDir: {}
{{- include "shoal.securityVolumes" . }}
{{- with .root.Values.model }}
{{- if eq .source "hub" }}
- name: hub-cache
  {{- if and (eq $.service "worker") (or .hub.cache.create .hub.cache.existingClaim) }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-hub-cache" (include "shoal.fullname" $.root)) .hub.cache.existingClaim }}
  {{- else if eq $.service "worker" }}
  emptyDir:
    sizeLimit: {{ .hub.cache.size }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- else if eq .source "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .pvc.claimName }}
    readOnly: true
{{- end }}
{{- end }}
{{- end -}}
