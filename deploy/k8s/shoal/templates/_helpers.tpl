{{/* Names, labels and numbers that every template shares. */}}

{{- define "shoal.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 48 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The name of a service's objects. Takes {root, service}. */}}
{{- define "shoal.name" -}}
{{- printf "%s-%s" (include "shoal.fullname" .root) .service -}}
{{- end -}}

{{/* What selects a service's pods; immutable. Takes {root, service}. */}}
{{- define "shoal.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .service }}
{{- end -}}

{{/* Labels of an object. Takes {root, service}. */}}
{{- define "shoal.labels" -}}
{{ include "shoal.selectorLabels" . }}
app.kubernetes.io/part-of: shoal
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Name, namespace and labels of an object. Takes {root, service} and perhaps name. */}}
{{- define "shoal.metadata" -}}
name: {{ default (include "shoal.name" .) .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "shoal.labels" . | nindent 2 }}
{{- end -}}

{{/* The image of a service. Takes {root, service}. */}}
{{- define "shoal.image" -}}
{{- $image := (index .root.Values .service).image -}}
{{- $tag := coalesce $image.tag .root.Values.image.tag .root.Chart.AppVersion -}}
{{- $name := $image.repository -}}
{{- with .root.Values.image.registry }}{{ $name = printf "%s/%s" (trimSuffix "/" .) $name }}{{ end -}}
{{- if $image.digest }}{{ printf "%s@%s" $name $image.digest }}{{ else }}{{ printf "%s:%s" $name $tag }}{{ end -}}
{{- end -}}

{{/* host:port to listen on; IPv6 in brackets. Takes {root, port}. */}}
{{- define "shoal.listen" -}}
{{- $host := .root.Values.listenHost -}}
{{- if contains ":" $host }}{{ printf "[%s]:%v" $host .port }}{{ else }}{{ printf "%s:%v" $host .port }}{{ end -}}
{{- end -}}

{{/*
The drain of a pod, all from drainSeconds:

  |-- preStop --|---------- drain ----------|- margin -| SIGKILL
  deleted       SIGTERM                     exit
                --drain-timeout=drainSeconds
  |------------ terminationGracePeriodSeconds ---------|

During preStop the pod still takes work, while its removal from the endpoints spreads.
*/}}
{{- define "shoal.preStopSeconds" -}}5{{- end -}}
{{- define "shoal.graceSeconds" -}}
{{- add (include "shoal.preStopSeconds" . | int) (.Values.drainSeconds | int) 10 -}}
{{- end -}}

{{/* The flag that tells the gateway where a service is. Takes {root, service}. */}}
{{- define "shoal.peer" -}}
{{- $name := include "shoal.name" . -}}
{{- if eq .root.Values.discovery.type "kubernetes" -}}
{{- printf "--%s-addresses=k8s:%s/%s:grpc" .service .root.Release.Namespace $name -}}
{{- else -}}
{{- printf "--%s-addresses=dns:%s.%s.svc.%s:50051" .service $name .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end -}}
{{- end -}}

{{/* The secret with the certificate of a side, internal or public; empty without TLS. Takes {root, side}. */}}
{{- define "shoal.tlsSecret" -}}
{{- $tls := index .root.Values.tls .side -}}
{{- if $tls.existingSecret -}}
{{- $tls.existingSecret -}}
{{- else if $tls.issuerRef.name -}}
{{- printf "%s-%s-tls" (include "shoal.fullname" .root) .side -}}
{{- end -}}
{{- end -}}

{{/* http or https, as clients of the gateway must say. */}}
{{- define "shoal.scheme" -}}
{{- ternary "https" "http" (ne (include "shoal.tlsSecret" (dict "root" . "side" "public")) "") -}}
{{- end -}}

{{/* Refuses values that the schema cannot see to be wrong. */}}
{{- define "shoal.validate" -}}
{{- $model := .Values.model -}}
{{- if and (eq $model.source "hub") (not $model.hub.id) }}{{ fail "model.source hub needs model.hub.id" }}{{ end -}}
{{- if and (eq $model.source "pvc") (not (and $model.pvc.claimName $model.pvc.path)) -}}
{{- fail "model.source pvc needs model.pvc.claimName and model.pvc.path" -}}
{{- end -}}
{{- if and $model.hub.cache.create $model.hub.cache.existingClaim -}}
{{- fail "model.hub.cache: either create or existingClaim" -}}
{{- end -}}
{{- range $side := list "internal" "public" -}}
{{- $tls := index $.Values.tls $side -}}
{{- if and $tls.existingSecret $tls.issuerRef.name -}}
{{- fail (printf "tls.%s: either existingSecret or issuerRef" $side) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.tls.public.requireClientCertificates (not (include "shoal.tlsSecret" (dict "root" . "side" "public"))) -}}
{{- fail "tls.public.requireClientCertificates needs tls.public.existingSecret or tls.public.issuerRef" -}}
{{- end -}}
{{- $gpus := int .Values.worker.gpu.count -}}
{{- if and (gt $gpus 0) (ne $gpus (int .Values.worker.tensorParallel)) -}}
{{- fail (printf "worker.gpu.count %d must equal worker.tensorParallel %d: one GPU a rank" $gpus (int .Values.worker.tensorParallel)) -}}
{{- end -}}
{{- if and (eq .Values.probes.type "grpc") (semverCompare "<1.24.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail "probes.type grpc needs Kubernetes 1.24 or newer; set it to http" -}}
{{- end -}}
{{- range $service := list "gateway" "tokenizer" "detokenizer" "worker" -}}
{{- with (index $.Values $service).autoscaling -}}
{{- if and .enabled (lt (int .maxReplicas) (int .minReplicas)) -}}
{{- fail (printf "%s.autoscaling: maxReplicas is below minReplicas" $service) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
