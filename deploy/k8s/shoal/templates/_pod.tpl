{{/* The pieces of a pod that the services have in common. All take a context (_parts.tpl). */}}

{{/* Metadata of a pod template. */}}
{{- define "shoal.podMetadata" -}}
{{- with .values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
# No chart version here: an upgrade that changes nothing else must not restart the fleet.
labels:
  {{- include "shoal.selectorLabels" . | nindent 2 }}
  app.kubernetes.io/part-of: shoal
  {{- with .role }}
  shoal/role: {{ . }}
  {{- end }}
  {{- with .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Everything of a pod's spec beside its containers and volumes. */}}
{{- define "shoal.podSpec" -}}
serviceAccountName: {{ include "shoal.name" . }}
automountServiceAccountToken: {{ and (eq .service "gateway") (eq .root.Values.discovery.type "kubernetes") }}
# Kubernetes would set SHOAL_..._PORT=tcp://... for every Service, in the namespace of our options.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "shoal.graceSeconds" .root }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- include "shoal.pullSecrets" .root }}
{{- include "shoal.placement" . }}
{{- end -}}

{{/* Takes the root. */}}
{{- define "shoal.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Which nodes may take a pod, and how a part's pods keep apart. */}}
{{- define "shoal.placement" -}}
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
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with merge (deepCopy .values.affinity) (include "shoal.antiAffinity" . | fromYaml) }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{- define "shoal.antiAffinity" -}}
{{- if ne .root.Values.podAntiAffinity "none" }}
podAntiAffinity:
  {{- if eq .root.Values.podAntiAffinity "hard" }}
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels:
          {{- include "shoal.selectorLabels" . | nindent 10 }}
  {{- else }}
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 50
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "shoal.selectorLabels" . | nindent 12 }}
  {{- end }}
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
      # A follower computes as long as its leader may drain.
      command: ["sleep", {{ ternary (add (include "shoal.preStopSeconds" .root | int) (.root.Values.drainSeconds | int)) (include "shoal.preStopSeconds" .root | int) (eq (default "" .role) "follower") | quote }}]
{{- end -}}

{{/* Where a service behind the gateway listens. */}}
{{- define "shoal.listenArgs" -}}
- {{ include "shoal.listen" (dict "root" .root "port" 50051) | printf "--address=%s" | quote }}
- {{ include "shoal.listen" (dict "root" .root "port" 9090) | printf "--admin-address=%s" | quote }}
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
{{- range $name, $value := .values.config }}
- name: SHOAL_{{ snakecase $name | upper }}
  {{- /* Helm reads numbers as floats and would print large ones as 1e+06. */}}
  value: {{ if and (kindIs "float64" $value) (eq (floor $value) $value) }}{{ int64 $value | quote }}{{ else }}{{ $value | quote }}{{ end }}
{{- end }}
{{- with .values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
Probes of a service. They ask the admin port where TLS keeps the kubelet out of the others.
Start-up and readiness ask whether the model is loaded and the engine makes steps; liveness asks
only whether the process is worth keeping, so that a pod that loads or drains is not restarted.
The follower of a group serves nobody: it has liveness alone.
*/}}
{{- define "shoal.probes" -}}
{{- if ne (default "" .role) "follower" }}
startupProbe:
  {{- include "shoal.readyCheck" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add .values.startupSeconds 4) 5 }}
readinessProbe:
  {{- include "shoal.readyCheck" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}
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
