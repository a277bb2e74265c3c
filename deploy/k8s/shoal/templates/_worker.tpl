{{/*
A pool of workers. One host a replica is a Deployment; several are a LeaderWorkerSet, whose groups
of pods start and end as one:

  group   leader     rank 0: serves, probed like any worker, behind the headless Service
          follower   the other hosts' ranks: liveness alone, no Service

All take a context (_parts.tpl), those of a pod with `role` beside: "", leader or follower.
*/}}

{{- define "shoal.workers" -}}
{{- if gt (int .values.hosts) 1 -}}
{{- include "shoal.workerGroups" . -}}
{{- else -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "shoal.metadata" . | nindent 2 }}
spec:
  {{- include "shoal.deploymentSpec" . | nindent 2 }}
  template:
    {{- include "shoal.workerPod" (merge (dict "role" "") .) | nindent 4 }}
{{- end -}}
{{- end -}}

{{- define "shoal.workerGroups" -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  {{- include "shoal.metadata" . | nindent 2 }}
  {{- with .values.exclusiveTopology }}
  annotations:
    leaderworkerset.sigs.k8s.io/exclusive-topology: {{ . }}
  {{- end }}
spec:
  {{- include "shoal.replicas" . | nindent 2 }}
  # A Service for each group, which tells of a leader before it is ready; the shared one would have
  # the name of ours, which tells of those that serve.
  networkConfig: {subdomainPolicy: UniquePerReplica}
  # A leader is ready only when its followers have joined, so they must not wait for that.
  startupPolicy: LeaderCreated
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration:
      maxUnavailable: {{ dig "rollingUpdate" "maxUnavailable" 1 .values.updateStrategy }}
      maxSurge: {{ dig "rollingUpdate" "maxSurge" 0 .values.updateStrategy }}
  leaderWorkerTemplate:
    size: {{ .values.hosts }}
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate:
      {{- include "shoal.workerPod" (merge (dict "role" "leader") .) | nindent 6 }}
    workerTemplate:
      {{- include "shoal.workerPod" (merge (dict "role" "follower") .) | nindent 6 }}
{{- end -}}

{{- define "shoal.workerPod" -}}
metadata:
  {{- include "shoal.podMetadata" . | nindent 2 }}
spec:
  {{- include "shoal.podSpec" . | nindent 2 }}
  {{- include "shoal.initContainers" . | nindent 2 }}
  containers:
    - {{- include "shoal.container" . | nindent 6 }}
      args:
        {{- include "shoal.workerArgs" . | nindent 8 }}
      env:
        {{- include "shoal.workerEnv" . | nindent 8 }}
      ports:
        {{- if ne .role "follower" }}
        - {name: grpc, containerPort: 50051}
        {{- end }}
        - {name: admin, containerPort: 9090}
      {{- include "shoal.probes" . | nindent 6 }}
      resources:
        {{- include "shoal.workerResources" . | nindent 8 }}
      volumeMounts:
        {{- include "shoal.volumeMounts" . | nindent 8 }}
        - name: shared-memory
          mountPath: /dev/shm
  volumes:
    {{- include "shoal.volumes" . | nindent 4 }}
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: {{ .values.sharedMemory }}
{{- end -}}

{{- define "shoal.workerArgs" -}}
- worker
{{- include "shoal.listenArgs" . | nindent 0 }}
- --tp={{ .values.tensorParallel }}
{{- if .role }}
# The LeaderWorkerSet controller sets these variables.
- --nnodes={{ .values.hosts }}
- --node-rank=$(LWS_WORKER_INDEX)
- --rendezvous=$(LWS_LEADER_ADDRESS):29500
{{- end }}
{{- include "shoal.commonArgs" . | nindent 0 }}
{{- include "shoal.securityArgs" . | nindent 0 }}
{{- include "shoal.modelArgs" . | nindent 0 }}
{{- if and (int .values.gpu.count) (not (hasKey .values.config "device")) }}
# So that a pod without its GPU fails, rather than computes on its CPU.
- --device=cuda
{{- end }}
{{- with .values.extraArgs }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{- define "shoal.workerEnv" -}}
{{- if not (or (int .values.gpu.count) (ne (int .values.tensorParallel) 1) (hasKey .values.config "numThreads")) }}
# Torch counts the node's cores, not the container's.
- name: SHOAL_NUM_THREADS
  valueFrom:
    resourceFieldRef:
      containerName: worker
      resource: limits.cpu
{{- end }}
{{- include "shoal.modelEnv" . | nindent 0 }}
{{- include "shoal.configEnv" . | nindent 0 }}
{{- end -}}

{{- define "shoal.workerResources" -}}
{{- $resources := deepCopy .values.resources -}}
{{- if int .values.gpu.count -}}
{{- $gpus := dict .values.gpu.resourceName (int .values.gpu.count) -}}
{{- $_ := set $resources "limits" (merge $gpus (default dict $resources.limits)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/*
Scales a pool by what the gateway and the workers know of it, down to none where it may: a request
that came while there was none is held by the gateway (holdTimeout) and counted there.
*/}}
{{- define "shoal.scaledObject" -}}
{{- $keda := .values.keda -}}
{{- if $keda.enabled }}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "shoal.metadata" . | nindent 2 }}
spec:
  scaleTargetRef:
    {{- include "shoal.scaleTarget" . | nindent 4 }}
  minReplicaCount: {{ $keda.minReplicas }}
  maxReplicaCount: {{ $keda.maxReplicas }}
  pollingInterval: {{ $keda.pollingSeconds }}
  cooldownPeriod: {{ $keda.cooldownSeconds }}
  {{- with .values.autoscaling.behavior }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        {{- toYaml . | nindent 8 }}
  {{- end }}
  triggers:
    {{- if $keda.triggers }}
    {{- toYaml $keda.triggers | nindent 4 }}
    {{- else }}
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ $keda.serverAddress }}
        threshold: {{ $keda.requestsPerReplica | quote }}
        activationThreshold: "0"
        query: {{ include "shoal.requestsQuery" . | quote }}
    {{- end }}
{{- end }}
{{- end -}}

{{/* PromQL: the requests that a pool runs, those that wait there, and those held for its model. */}}
{{- define "shoal.requestsQuery" -}}
{{- $pods := ternary "[0-9]+" "[a-z0-9]+-[a-z0-9]+" (gt (int .values.hosts) 1) -}}
{{- $workers := printf "{__name__=~\"vllm:num_requests_(running|waiting)\",namespace=%q,pod=~\"%s-%s\"}" .root.Release.Namespace (include "shoal.name" .) $pods -}}
{{- if .model.servedName -}}
{{- printf "sum(%s or shoal_gateway_requests_held{namespace=%q,model=%q})" $workers .root.Release.Namespace .model.servedName -}}
{{- else -}}
{{- printf "sum(%s)" $workers -}}
{{- end -}}
{{- end -}}
