{{- define "coppice.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "coppice.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "coppice.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "coppice.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select pods. Kubernetes does not allow changing them, so they contain no values. */}}
{{- define "coppice.selector" -}}
app.kubernetes.io/name: coppice
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "coppice.labels" -}}
{{ include "coppice.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "coppice.image" -}}
{{- $flavour := ternary "gpu" "cpu" (gt (int .Values.gpu.count) 0) -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion $flavour) }}
{{- end -}}
{{- end -}}

{{- define "coppice.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "coppice.fullname" .) -}}
{{- end -}}

{{/* Number of pods of a replica, each on a machine of its own. */}}
{{- define "coppice.nnodes" -}}
{{- get .Values.engine "nnodes" | default 1 | int -}}
{{- end -}}

{{/* Name of the LeaderWorkerSet, which creates a Service of the same name. */}}
{{- define "coppice.groupName" -}}
{{- printf "%s-nodes" (include "coppice.fullname" .) -}}
{{- end -}}

{{/* Labels that select pods that serve requests: the first pod of each replica. */}}
{{- define "coppice.servingSelector" -}}
{{ include "coppice.selector" . }}
{{- if gt (include "coppice.nnodes" . | int) 1 }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end -}}

{{/* Object whose replicas an autoscaler changes. */}}
{{- define "coppice.scaleTarget" -}}
{{- if gt (include "coppice.nnodes" . | int) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
name: {{ include "coppice.groupName" . }}
{{- else -}}
apiVersion: apps/v1
kind: Deployment
name: {{ include "coppice.fullname" . }}
{{- end -}}
{{- end -}}

{{/* A quantity as bytes: 512Mi, 2G, 1073741824. */}}
{{- define "coppice.bytes" -}}
{{- $text := . | toString -}}
{{- if not (regexMatch "^[0-9]+([KMGT]i?|k)?$" $text) -}}
{{- fail (printf "%q is no quantity of bytes that the chart supports, such as 512Mi" $text) -}}
{{- end -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- $factors := dict "" 1 "k" 1000 "K" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mul (regexFind "^[0-9]+" $text | int64) (get $factors $unit | int64) -}}
{{- end -}}

{{/* Used size of the pod's /dev/shm: the engine's part and the arena. */}}
{{- define "coppice.shmBytes" -}}
{{- add (include "coppice.bytes" .Values.shm.engine | int64) (include "coppice.bytes" .Values.shm.arena | int64) -}}
{{- end -}}

{{/* KV cache of prompt spans, which is in the engine's part. */}}
{{- define "coppice.spansBytes" -}}
{{- get .Values.kv "spans_bytes" | default 0 | int64 -}}
{{- end -}}

{{/* Size of the mount. It is larger than the used size, because the server uses at most half of the free space for the arena and for spans. Only used pages count as memory. */}}
{{- define "coppice.shmMount" -}}
{{- add (include "coppice.shmBytes" .) (include "coppice.bytes" .Values.shm.arena) (include "coppice.spansBytes" .) -}}
{{- end -}}

{{- define "coppice.graceSeconds" -}}
{{- add (int .Values.drain.endpointSeconds) (int .Values.drain.requestSeconds) (int .Values.drain.teardownSeconds) -}}
{{- end -}}

{{/* URL of one pod, whose address is known only when it runs. */}}
{{- define "coppice.advertisedUrl" -}}
{{- .Values.fleet.advertisedUrl | default (printf "http://$(POD_IP):%d" (int .Values.containerPort)) -}}
{{- end -}}

{{/* Name of the port for /metrics and the routes of the role admin. */}}
{{- define "coppice.operatorsPort" -}}
{{- ternary "operators" "http" (gt (int .Values.operatorsPort) 0) -}}
{{- end -}}

{{/* DNS names of the Service within the Kubernetes cluster. */}}
{{- define "coppice.serviceNames" -}}
{{- $name := include "coppice.fullname" . -}}
{{- $inNamespace := printf "%s.%s" $name .Release.Namespace -}}
{{- list $name $inNamespace (printf "%s.svc" $inNamespace) (printf "%s.svc.cluster.local" $inNamespace) | toJson -}}
{{- end -}}

{{/* The settings file: the given settings, and those derived from other values. */}}
{{- define "coppice.settings" -}}
{{- $server := dict "host" "0.0.0.0" "port" (int .Values.containerPort) "drain_seconds" (int .Values.drain.requestSeconds) "stop_seconds" (int .Values.drain.teardownSeconds) -}}
{{- if .Values.ui -}}
{{- $_ := set $server "ui" true -}}
{{- end -}}
{{- if gt (int .Values.operatorsPort) 0 -}}
{{- $_ := set $server "operators_host" "0.0.0.0" -}}
{{- $_ := set $server "operators_port" (int .Values.operatorsPort) -}}
{{- end -}}
{{- if .Values.auth.existingSecret -}}
{{- $_ := set $server "keys_file" "/etc/coppice/keys/keys.yaml" -}}
{{- else -}}
{{- $_ := set $server "allow_open" true -}}
{{- $_ := set $server "allowed_hosts" (concat (include "coppice.serviceNames" . | fromJsonArray) .Values.auth.allowedHosts) -}}
{{- end -}}
{{- $engine := merge (dict "start_seconds" (int .Values.probes.startup.maxSeconds) "cache_directory" "/cache") .Values.engine -}}
{{- with .Values.model.name -}}
{{- $_ := set $engine "model" . -}}
{{- end -}}
{{- with .Values.model.revision -}}
{{- $_ := set $engine "revision" . -}}
{{- end -}}
{{- $kv := merge (dict) .Values.kv -}}
{{- $arena := include "coppice.bytes" .Values.shm.arena | int64 -}}
{{- if gt $arena 0 -}}
{{- $_ := set $engine "prompt_kv" true -}}
{{- $_ := set $kv "capacity_bytes" $arena -}}
{{- else -}}
{{- $_ := set $engine "prompt_kv" false -}}
{{- end -}}
{{- $_ := set $kv "spans_bytes" (include "coppice.spansBytes" . | int64) -}}
{{- $cluster := merge (dict) .Values.cluster -}}
{{- with .Values.fleet.redis.url -}}
{{- $_ := set $cluster "redis_url" . -}}
{{- end -}}
{{- with .Values.fleet.redis.user -}}
{{- $_ := set $cluster "redis_user" . -}}
{{- end -}}
{{- if .Values.fleet.redis.existingSecret -}}
{{- $_ := set $cluster "redis_password_file" "/etc/coppice/redis/password" -}}
{{- end -}}
{{- $weights := merge (dict "directory" (ternary "/weights" "/cache/weights" (gt (include "coppice.nnodes" . | int) 1))) .Values.weights -}}
{{- if .Values.auth.peerSecretKey -}}
{{- $_ := set $weights "peer_key_file" "/etc/coppice/keys/peer-key" -}}
{{- end -}}
{{- toYaml (dict "server" $server "engine" $engine "attention" .Values.attention "speculation" .Values.speculation "graphs" .Values.graphs "kv" $kv "weights" $weights "cluster" $cluster "limits" .Values.limits "sessions" .Values.sessions "log" .Values.log "trace" .Values.trace) -}}
{{- end -}}

{{/* Rules with job="coppice" replaced by the job and namespace of this release. */}}
{{- define "coppice.matchers" -}}
{{- printf "job=%q,namespace=%q" (include "coppice.fullname" .) .Release.Namespace -}}
{{- end -}}
