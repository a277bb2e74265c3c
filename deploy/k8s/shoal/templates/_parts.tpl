{{/*
What a service consists of. `worker` describes one pool of workers and is what `pools` start from;
`model` describes one model and is what `models` start from:

  no pools    one part, without a name, as `worker` says
  pools       a part for each, `worker` with the pool's own values over it
  no models   one model, one tokenizer and one detokenizer part
  models      a tokenizer and a detokenizer part for each; every pool names its model
  no detokenizers (detokenizer.enabled false)
              the gateway decodes, so it has the model's files, too

A part's context is {root, service, part, values, model}; each template of an object takes one. The
gateway's has a model only where it decodes.
*/}}

{{/* Sets `parts`, the contexts of a service's parts, in its argument. Takes {root, service}. */}}
{{- define "shoal.setParts" -}}
{{- $root := .root -}}
{{- $service := .service -}}
{{- $values := index $root.Values $service -}}
{{- $parts := list -}}
{{- $gatewayDecodes := not $root.Values.detokenizer.enabled -}}
{{- if and (eq $service "detokenizer") $gatewayDecodes -}}
{{- /* None. */ -}}
{{- else if and (eq $service "gateway") $gatewayDecodes -}}
{{- $name := include "shoal.decodedModel" $root -}}
{{- $parts = append $parts (dict "root" $root "service" $service "part" "" "values" (merge (dict "model" $name) $values)) -}}
{{- else if and (eq $service "worker") $root.Values.pools -}}
{{- range $name, $pool := $root.Values.pools -}}
{{- $merged := mergeOverwrite (deepCopy $values) (deepCopy (default dict $pool)) -}}
{{- $parts = append $parts (dict "root" $root "service" $service "part" $name "values" $merged) -}}
{{- end -}}
{{- else if and (has $service (list "tokenizer" "detokenizer")) $root.Values.models -}}
{{- range $name, $_ := $root.Values.models -}}
{{- $parts = append $parts (dict "root" $root "service" $service "part" $name "values" (merge (dict "model" $name) $values)) -}}
{{- end -}}
{{- else -}}
{{- $parts = append $parts (dict "root" $root "service" $service "part" "" "values" $values) -}}
{{- end -}}
{{- if or (ne $service "gateway") $gatewayDecodes -}}
{{- range $parts }}{{ include "shoal.setModel" . }}{{ end -}}
{{- end -}}
{{- $_ := set . "parts" $parts -}}
{{- end -}}

{{/* The key in `models` of the model that a gateway decodes for; empty where there are none. Takes the root. */}}
{{- define "shoal.decodedModel" -}}
{{- $names := keys .Values.models | sortAlpha -}}
{{- if gt (len $names) 1 -}}
{{- fail (printf "detokenizer.enabled false: a gateway decodes for one model, and models has %s" (join ", " $names)) -}}
{{- end -}}
{{- join "" $names -}}
{{- end -}}

{{/* Sets `model`, the values of the model that a part serves, in the part's context. */}}
{{- define "shoal.setModel" -}}
{{- $name := default "" .values.model -}}
{{- $models := .root.Values.models -}}
{{- if $models -}}
{{- $where := ternary (printf "pools.%s.model" .part) "worker.model" (ne .part "") -}}
{{- if not (hasKey $models $name) -}}
{{- fail (printf "%s must be one of models: %s" $where (keys $models | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $model := mergeOverwrite (deepCopy .root.Values.model) (deepCopy (default dict (index $models $name))) -}}
{{- if not $model.servedName }}{{ $_ := set $model "servedName" $name }}{{ end -}}
{{- $_ := set . "model" (merge (dict "key" $name) $model) -}}
{{- else -}}
{{- if $name }}{{ fail (printf "model %s is named where models are none" $name) }}{{ end -}}
{{- $_ := set . "model" (merge (dict "key" "") .root.Values.model) -}}
{{- end -}}
{{- end -}}

{{/* Sets `models`, one context {root, service, values, model} for each, in its argument. Takes {root}. */}}
{{- define "shoal.setModels" -}}
{{- $found := dict "root" .root "service" "tokenizer" -}}
{{- include "shoal.setParts" $found -}}
{{- $_ := set . "models" $found.parts -}}
{{- end -}}

{{/* The objects that a template makes of every part of a service. Takes {root, service, template}. */}}
{{- define "shoal.each" -}}
{{- $found := dict "root" .root "service" .service -}}
{{- include "shoal.setParts" $found -}}
{{- $template := .template -}}
{{- range $found.parts }}
---
{{ include $template . }}
{{- end }}
{{- end -}}
