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

{{/* The name of a part's objects. Takes {root, service} and perhaps part. */}}
{{- define "shoal.name" -}}
{{- $name := printf "%s-%s" (include "shoal.fullname" .root) .service -}}
{{- with .part }}{{ $name = printf "%s-%s" $name . }}{{ end -}}
{{- if gt (len $name) 63 }}{{ fail (printf "%s has more than 63 characters: shorten the release's, the pool's or the model's name" $name) }}{{ end -}}
{{- $name -}}
{{- end -}}

{{/*
What selects the pods of a service, or of one of its parts (a pool of workers, a model's
tokenizers); immutable. Takes {root, service} and perhaps part.
*/}}
{{- define "shoal.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .service }}
{{- with .part }}
shoal/{{ ternary "pool" "model" (eq $.service "worker") }}: {{ . | quote }}
{{- end }}
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

{{/* An image. Takes {root, values}. */}}
{{- define "shoal.image" -}}
{{- $image := .values.image -}}
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

{{/* Where the gateway finds a part of a service. Takes a context. */}}
{{- define "shoal.address" -}}
{{- $name := include "shoal.name" . -}}
{{- if eq .root.Values.discovery.type "kubernetes" -}}
{{- printf "k8s:%s/%s:grpc" .root.Release.Namespace $name -}}
{{- else -}}
{{- printf "dns:%s.%s.svc.%s:50051" $name .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end -}}
{{- end -}}

{{/* The flag that tells the gateway where every part of a service is, if it has any. Takes {root, service}. */}}
{{- define "shoal.peer" -}}
{{- $found := dict "root" .root "service" .service -}}
{{- include "shoal.setParts" $found -}}
{{- $addresses := list -}}
{{- range $found.parts }}{{ $addresses = append $addresses (include "shoal.address" .) }}{{ end -}}
{{- with $addresses }}
- {{ printf "--%s-addresses=%s" $.service (join "," .) | quote }}
{{- end }}
{{- end -}}

{{/* The flag with the models that the gateway may expect while no worker serves them. Takes the root. */}}
{{- define "shoal.expectedModels" -}}
{{- $found := dict "root" . -}}
{{- include "shoal.setModels" $found -}}
{{- $names := list -}}
{{- range $found.models }}{{ with .model.servedName }}{{ $names = append $names . }}{{ end }}{{ end -}}
{{- with $names }}
- {{ join "," . | printf "--expect-models=%s" | quote }}
{{- end }}
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
