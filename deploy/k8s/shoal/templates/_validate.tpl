{{/* Refuses values that the schema cannot see to be wrong. */}}

{{- define "shoal.validate" -}}
{{- include "shoal.validateCluster" . -}}
{{- include "shoal.validateTls" . -}}
{{- include "shoal.validateRoutes" . -}}
{{- $models := dict "root" $ -}}
{{- include "shoal.setModels" $models -}}
{{- range $models.models }}{{ include "shoal.validateModel" . }}{{ end -}}
{{- with .Values.detokenizer -}}
{{- if and .enabled (not .autoscaling.enabled) (eq (int .replicas) 0) -}}
{{- fail "detokenizer.replicas 0 leaves nobody to decode: with detokenizer.enabled false the gateway does it" -}}
{{- end -}}
{{- end -}}
{{- range $service := list "gateway" "tokenizer" "detokenizer" "worker" -}}
{{- $found := dict "root" $ "service" $service -}}
{{- include "shoal.setParts" $found -}}
{{- range $found.parts -}}
{{- $_ := include "shoal.name" . -}}
{{- include "shoal.validateScaling" . -}}
{{- include "shoal.validateDrain" . -}}
{{- if eq $service "worker" }}{{ include "shoal.validateWorker" . }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* How a part is called in the values. */}}
{{- define "shoal.where" -}}
{{- if and (eq .service "worker") .part }}pools.{{ .part }}{{ else }}{{ .service }}{{ end -}}
{{- end -}}

{{- define "shoal.validateCluster" -}}
{{- $version := .Capabilities.KubeVersion.Version -}}
{{- if and (eq .Values.probes.type "grpc") (semverCompare "<1.24.0-0" $version) -}}
{{- fail "probes.type grpc needs Kubernetes 1.24 or newer; set it to http" -}}
{{- end -}}
{{- end -}}

{{- define "shoal.validateTls" -}}
{{- range $side := list "internal" "public" -}}
{{- $tls := index $.Values.tls $side -}}
{{- if and $tls.existingSecret $tls.issuerRef.name -}}
{{- fail (printf "tls.%s: either existingSecret or issuerRef" $side) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.tls.public.requireClientCertificates (not (include "shoal.tlsSecret" (dict "root" . "side" "public"))) -}}
{{- fail "tls.public.requireClientCertificates needs tls.public.existingSecret or tls.public.issuerRef" -}}
{{- end -}}
{{- end -}}

{{- define "shoal.validateModel" -}}
{{- $where := ternary (printf "models.%s" .model.key) "model" (ne .model.key "") -}}
{{- $cache := .model.hub.cache -}}
{{- if and (eq .model.source "hub") (not .model.hub.id) }}{{ fail (printf "%s.source hub needs %s.hub.id" $where $where) }}{{ end -}}
{{- if and (eq .model.source "pvc") (not (and .model.pvc.claimName .model.pvc.path)) -}}
{{- fail (printf "%s.source pvc needs %s.pvc.claimName and %s.pvc.path" $where $where $where) -}}
{{- end -}}
{{- if eq .model.source "image" -}}
{{- if not .model.image.reference }}{{ fail (printf "%s.source image needs %s.image.reference" $where $where) }}{{ end -}}
{{- if semverCompare "<1.31.0-0" .root.Capabilities.KubeVersion.Version -}}
{{- fail (printf "%s.source image needs Kubernetes 1.31 or newer, with the feature ImageVolume" $where) -}}
{{- end -}}
{{- end -}}
{{- if and $cache.create $cache.existingClaim }}{{ fail (printf "%s.hub.cache: either create or existingClaim" $where) }}{{ end -}}
{{- if and .model.hub.downloadJob (eq .model.source "hub") (not (or $cache.create $cache.existingClaim)) -}}
{{- fail (printf "%s.hub.downloadJob needs %s.hub.cache.create or %s.hub.cache.existingClaim" $where $where $where) -}}
{{- end -}}
{{- end -}}

{{- define "shoal.validateScaling" -}}
{{- $where := include "shoal.where" . -}}
{{- with .values.autoscaling -}}
{{- if and .enabled (lt (int .maxReplicas) (int .minReplicas)) }}{{ fail (printf "%s.autoscaling: maxReplicas is below minReplicas" $where) }}{{ end -}}
{{- end -}}
{{- with .values.keda -}}
{{- if .enabled -}}
{{- if $.values.autoscaling.enabled }}{{ fail (printf "%s: either autoscaling or keda" $where) }}{{ end -}}
{{- if lt (int .maxReplicas) (max 1 (int .minReplicas)) }}{{ fail (printf "%s.keda: maxReplicas is below minReplicas" $where) }}{{ end -}}
{{- if eq (int .minReplicas) 0 -}}
{{- if not $.model.servedName }}{{ fail (printf "%s.keda.minReplicas 0 needs model.servedName: the gateway must know whose requests to hold" $where) }}{{ end -}}
{{- if not (gt (float64 (default 0 $.root.Values.gateway.config.holdTimeout)) 0.0) -}}
{{- fail (printf "%s.keda.minReplicas 0 needs gateway.config.holdTimeout: the seconds for which requests wait for the first worker" $where) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The grace period of a pod follows from drainSeconds, and from nothing that is said elsewhere. */}}
{{- define "shoal.validateDrain" -}}
{{- $said := join " " .values.extraArgs -}}
{{- range .values.extraEnv }}{{ $said = printf "%s %s" $said .name }}{{ end -}}
{{- if or (contains "--drain-timeout" $said) (contains "SHOAL_DRAIN_TIMEOUT" $said) -}}
{{- fail (printf "%s: say drainSeconds in place of --drain-timeout, so that the grace period follows" (include "shoal.where" .)) -}}
{{- end -}}
{{- end -}}

{{- define "shoal.validateWorker" -}}
{{- $where := include "shoal.where" . -}}
{{- $hosts := int .values.hosts -}}
{{- $ranks := int .values.tensorParallel -}}
{{- $gpus := int .values.gpu.count -}}
{{- if and (gt $hosts 1) (gt (len (include "shoal.name" .)) 48) }}{{ fail (printf "%s has more than 48 characters, which a LeaderWorkerSet's pods cannot be named after: shorten the release's or the pool's name" (include "shoal.name" .)) }}{{ end -}}
{{- if mod $ranks $hosts }}{{ fail (printf "%s.tensorParallel %d cannot be shared by %s.hosts %d" $where $ranks $where $hosts) }}{{ end -}}
{{- if and (gt $gpus 0) (ne (mul $gpus $hosts) $ranks) -}}
{{- if eq $hosts 1 }}{{ fail (printf "%s.gpu.count %d must equal %s.tensorParallel %d: one GPU a rank" $where $gpus $where $ranks) }}{{ end -}}
{{- fail (printf "%s.gpu.count %d on each of %d hosts must make %s.tensorParallel %d: one GPU a rank" $where $gpus $hosts $where $ranks) -}}
{{- end -}}
{{- end -}}

{{- define "shoal.validateRoutes" -}}
{{- range $kind := list "httpRoute" "grpcRoute" -}}
{{- $route := index $.Values.gateway $kind -}}
{{- if and $route.enabled (not $route.parentRefs) }}{{ fail (printf "gateway.%s needs gateway.%s.parentRefs" $kind $kind) }}{{ end -}}
{{- end -}}
{{- with .Values.gateway.inferencePool -}}
{{- if and .enabled (not .endpointPicker.name) }}{{ fail "gateway.inferencePool needs gateway.inferencePool.endpointPicker.name" }}{{ end -}}
{{- end -}}
{{- end -}}
