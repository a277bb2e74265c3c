{{/* Whole objects that differ between services in little but the name. All take a context (_parts.tpl). */}}

{{- define "shoal.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "shoal.metadata" . | nindent 2 }}
  {{- with .values.serviceAccountAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
# A pod that needs the token mounts it by its own spec.
automountServiceAccountToken: false
{{- end -}}

{{/* A headless Service: clients see every pod, since one HTTP/2 connection balances nothing. */}}
{{- define "shoal.headlessService" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "shoal.metadata" . | nindent 2 }}
spec:
  clusterIP: None
  selector:
    {{- include "shoal.selectorLabels" . | nindent 4 }}
    {{- if gt (int (default 1 .values.hosts)) 1 }}
    shoal/role: leader
    {{- end }}
  ports:
    - name: grpc
      port: 50051
      targetPort: grpc
      appProtocol: {{ ternary "https" "kubernetes.io/h2c" (ne (include "shoal.tlsSecret" (dict "root" .root "side" "internal")) "") }}
    - name: admin
      port: 9090
      targetPort: admin
{{- end -}}

{{/* A tokenizer or a detokenizer: one image, two roles. */}}
{{- define "shoal.tokenizerDeployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "shoal.metadata" . | nindent 2 }}
spec:
  {{- include "shoal.deploymentSpec" . | nindent 2 }}
  template:
    metadata:
      {{- include "shoal.podMetadata" . | nindent 6 }}
    spec:
      {{- include "shoal.podSpec" . | nindent 6 }}
      {{- include "shoal.initContainers" . | nindent 6 }}
      containers:
        - {{- include "shoal.container" . | nindent 10 }}
          args:
            - {{ .service }}
            {{- include "shoal.listenArgs" . | nindent 12 }}
            {{- include "shoal.commonArgs" . | nindent 12 }}
            {{- include "shoal.securityArgs" . | nindent 12 }}
            {{- include "shoal.modelArgs" . | nindent 12 }}
            {{- with .values.extraArgs }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          env:
            {{- include "shoal.modelEnv" . | nindent 12 }}
            {{- include "shoal.configEnv" . | nindent 12 }}
          ports:
            - {name: grpc, containerPort: 50051}
            - {name: admin, containerPort: 9090}
          {{- include "shoal.probes" . | nindent 10 }}
          resources:
            {{- toYaml .values.resources | nindent 12 }}
          volumeMounts:
            {{- include "shoal.volumeMounts" . | nindent 12 }}
      volumes:
        {{- include "shoal.volumes" . | nindent 8 }}
{{- end -}}

{{/* The fields of a Deployment's spec beside its template. */}}
{{- define "shoal.deploymentSpec" -}}
{{- include "shoal.replicas" . }}
revisionHistoryLimit: 3
progressDeadlineSeconds: {{ add .values.startupSeconds 300 }}
strategy:
  {{- toYaml .values.updateStrategy | nindent 2 }}
selector:
  matchLabels:
    {{- include "shoal.selectorLabels" . | nindent 4 }}
{{- end -}}

{{/* How many, unless an autoscaler says. */}}
{{- define "shoal.replicas" -}}
{{- if not (or .values.autoscaling.enabled (and .values.keda .values.keda.enabled)) -}}
replicas: {{ .values.replicas }}
{{- end }}
{{- end -}}

{{- define "shoal.podDisruptionBudget" -}}
{{- $budget := .values.podDisruptionBudget -}}
{{- if $budget.enabled }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "shoal.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ $budget.maxUnavailable }}
  selector:
    matchLabels:
      {{- include "shoal.selectorLabels" . | nindent 6 }}
{{- end }}
{{- end -}}

{{/* What an autoscaler scales. */}}
{{- define "shoal.scaleTarget" -}}
{{- if gt (int (default 1 .values.hosts)) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ include "shoal.name" . }}
{{- end -}}

{{- define "shoal.autoscaler" -}}
{{- $scale := .values.autoscaling -}}
{{- if $scale.enabled }}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "shoal.metadata" . | nindent 2 }}
spec:
  scaleTargetRef:
    {{- include "shoal.scaleTarget" . | nindent 4 }}
  minReplicas: {{ $scale.minReplicas }}
  maxReplicas: {{ $scale.maxReplicas }}
  metrics:
    {{- if $scale.metrics }}
    {{- toYaml $scale.metrics | nindent 4 }}
    {{- else if eq .service "worker" }}
    - type: Pods
      pods:
        metric:
          name: vllm_num_requests_waiting
        target:
          type: AverageValue
          averageValue: "4"
    {{- else }}
    - type: Resource
      resource:
        name: cpu
        target:
          type: Utilization
          averageUtilization: 70
    {{- end }}
  {{- with $scale.behavior }}
  behavior:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The network of a service behind the gateway: gRPC from the gateway, metrics, and the hub. */}}
{{- define "shoal.backendNetworkPolicy" -}}
{{- $policy := .root.Values.networkPolicy -}}
{{- if $policy.enabled }}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "shoal.metadata" . | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "shoal.selectorLabels" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
  ingress:
    - from:
        - podSelector:
            matchLabels:
              {{- include "shoal.selectorLabels" (dict "root" .root "service" "gateway") | nindent 14 }}
      ports:
        - {protocol: TCP, port: grpc}
    - ports:
        - {protocol: TCP, port: admin}
      {{- with $policy.metricsFrom }}
      from:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    {{- if gt (int (default 1 .values.hosts)) 1 }}
    # The ranks of a group meet, and pass tensors, on ports that they choose.
    - from:
        - podSelector:
            matchLabels:
              {{- include "shoal.selectorLabels" . | nindent 14 }}
    {{- end }}
  {{- include "shoal.backendEgress" . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Nothing, unless the model, the traces or the other hosts of a group are elsewhere. */}}
{{- define "shoal.backendEgress" -}}
{{- $policy := .root.Values.networkPolicy -}}
{{- $ports := concat (ternary $policy.hubPorts list (ne (include "shoal.downloads" .) "")) (ternary $policy.otlpPorts list (ne .root.Values.tracing.otlpEndpoint "")) -}}
{{- $hosts := gt (int (default 1 .values.hosts)) 1 -}}
{{- if or $ports $hosts -}}
egress:
  {{- include "shoal.dnsEgress" . | nindent 2 }}
  {{- with $ports }}
  - ports:
      {{- range . }}
      - {protocol: TCP, port: {{ . }}}
      {{- end }}
  {{- end }}
  {{- if $hosts }}
  - to:
      - podSelector:
          matchLabels:
            {{- include "shoal.selectorLabels" . | nindent 12 }}
  {{- end }}
{{- else -}}
egress: []
{{- end }}
{{- end -}}

{{- define "shoal.dnsEgress" -}}
- ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end -}}
