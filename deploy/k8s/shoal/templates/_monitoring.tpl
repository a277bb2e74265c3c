{{/* What the objects for the Prometheus operator have in common. */}}

{{/* The release's job in Prometheus: dashboards and alerts select by it. */}}
{{- define "shoal.job" -}}
{{- printf "%s/%s" .Release.Namespace (include "shoal.fullname" .) -}}
{{- end -}}

{{/* How a pod is scraped. Takes {root, interval}. Targets are named as a local fleet's are. */}}
{{- define "shoal.endpoint" -}}
port: admin
path: /metrics
interval: {{ .interval }}
relabelings:
  - {targetLabel: job, replacement: {{ include "shoal.job" .root | quote }}}
  - {targetLabel: instance, sourceLabels: [__meta_kubernetes_pod_name]}
  - {targetLabel: component, sourceLabels: [__meta_kubernetes_pod_label_app_kubernetes_io_component]}
{{- end -}}

{{/*
files/rules.yaml for this release: its job and its targets in place of the file's, and without the
alerts that are switched off.
*/}}
{{- define "shoal.rules" -}}
{{- $values := .Values.prometheusRule -}}
{{- $text := .Files.Get "files/rules.yaml" -}}
{{- $text = replace `job="shoal"` (printf `job="%s"` (include "shoal.job" .)) $text -}}
{{- $text = replace `le="2.5"` (printf `le="%s"` $values.firstToken.seconds) $text -}}
{{- $text = replace `(1 - 0.99)` (printf `(1 - %v)` $values.firstToken.objective) $text -}}
{{- $text = replace `docs/operations.md` $values.runbooks $text -}}
{{- range (fromYaml $text).groups }}
- name: {{ .name }}
  rules:
    {{- range .rules }}
    {{- if not (has .alert $values.disabled) }}
    {{- list . | toYaml | nindent 4 }}
    {{- end }}
    {{- end }}
{{- end }}
{{- with $values.extraGroups }}
{{ toYaml . }}
{{- end }}
{{- end -}}
