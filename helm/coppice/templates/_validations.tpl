{{/* Checks across values, which a schema cannot express. Each message names the values. */}}
{{- define "coppice.validate" -}}
{{- $v := .Values -}}
{{- if not (or $v.auth.existingSecret $v.auth.allowOpen) -}}
{{- fail "auth.existingSecret names no Secret with keys; set it, or set auth.allowOpen to true to serve without keys" -}}
{{- end -}}
{{- if and $v.auth.existingSecret $v.auth.allowOpen -}}
{{- fail "auth.existingSecret and auth.allowOpen exclude each other" -}}
{{- end -}}
{{- if and $v.auth.peerSecretKey (not $v.auth.existingSecret) -}}
{{- fail "auth.peerSecretKey is a key of auth.existingSecret, which names no Secret" -}}
{{- end -}}
{{- if and $v.weights.peers $v.auth.existingSecret (not $v.auth.peerSecretKey) -}}
{{- fail "weights.peers needs auth.peerSecretKey: replicas with API keys serve weights to each other only with a key" -}}
{{- end -}}
{{- if eq (int $v.operatorsPort) (int $v.containerPort) -}}
{{- fail "operatorsPort and containerPort are the same; set operatorsPort to 0 for a single port" -}}
{{- end -}}
{{- $limit := dig "limits" "memory" "" $v.resources -}}
{{- if not $limit -}}
{{- fail "resources.limits.memory is needed, because shared memory counts against it" -}}
{{- end -}}
{{- $shm := include "coppice.shmBytes" . | int64 -}}
{{- if ge $shm (include "coppice.bytes" $limit | int64) -}}
{{- fail (printf "shm.engine and shm.arena take %d bytes, which leaves nothing of resources.limits.memory (%s)" $shm $limit) -}}
{{- end -}}
{{- if eq (include "coppice.bytes" $v.shm.engine | int64) 0 -}}
{{- fail "shm.engine must be above 0: the engine's processes communicate through shared memory" -}}
{{- end -}}
{{- if and (gt (include "coppice.spansBytes" . | int64) 0) (eq (include "coppice.bytes" $v.shm.arena | int64) 0) -}}
{{- fail "kv.spans_bytes needs shm.arena above 0: the engine exports KV only then" -}}
{{- end -}}
{{- if ge (include "coppice.spansBytes" . | int64) (include "coppice.bytes" $v.shm.engine | int64) -}}
{{- fail (printf "kv.spans_bytes must be below shm.engine (%s), which holds it" (toString $v.shm.engine)) -}}
{{- end -}}
{{- $ranks := mul (int (get $v.engine "tensor_parallel_size" | default 1)) (int (get $v.engine "pipeline_parallel_size" | default 1)) -}}
{{- $engines := int (get $v.engine "data_parallel_size" | default 1) -}}
{{- if eq (get $v.engine "distributed_executor_backend" | default "mp") "ray" -}}
{{- fail "engine.distributed_executor_backend ray needs Ray nodes, which this chart does not create; use KubeRay, as in docs/operate/several-machines.md, or engine.nnodes" -}}
{{- end -}}
{{- $nodes := include "coppice.nnodes" . | int -}}
{{- if and (gt $engines 1) (gt $nodes 1) -}}
{{- fail "engine.data_parallel_size and engine.nnodes above 1 exclude each other: all engines of a replica are on one machine" -}}
{{- end -}}
{{- if and (gt $engines 1) (has (get $v.speculation "mode") (list "siblings" "drafter")) -}}
{{- fail (printf "engine.data_parallel_size above 1 and speculation.mode %s exclude each other; set speculation.mode to off" (get $v.speculation "mode")) -}}
{{- end -}}
{{- if and (gt $engines 1) (get $v.engine "prompt_kv_gpu_bytes") -}}
{{- fail "engine.data_parallel_size above 1 and engine.prompt_kv_gpu_bytes exclude each other: a handle does not state the engine" -}}
{{- end -}}
{{- if gt (mod $ranks $nodes) 0 -}}
{{- fail (printf "engine.nnodes is %d, which does not divide the %d ranks of engine.tensor_parallel_size times engine.pipeline_parallel_size" $nodes $ranks) -}}
{{- end -}}
{{- if and (gt (int $v.gpu.count) 0) (ne (mul (int $v.gpu.count) $nodes) (mul $ranks $engines)) -}}
{{- fail (printf "gpu.count is %d per pod, engine.nnodes is %d, and engine.tensor_parallel_size times engine.pipeline_parallel_size times engine.data_parallel_size is %d" (int $v.gpu.count) $nodes (mul $ranks $engines)) -}}
{{- end -}}
{{- if and (gt $nodes 1) (gt (include "coppice.bytes" $v.shm.arena | int64) 0) -}}
{{- fail "shm.arena must be 0 with engine.nnodes above 1: prompt KV is exported to the shared memory of one machine" -}}
{{- end -}}
{{- if and (gt $nodes 1) $v.cache.existingClaim -}}
{{- fail "cache.existingClaim cannot be shared by the pods of a replica; leave it empty" -}}
{{- end -}}
{{- if and (gt $nodes 1) (not $v.cache.weightsClaim) -}}
{{- fail "cache.weightsClaim must be set with engine.nnodes above 1: all pods of a replica load published weights from it" -}}
{{- end -}}
{{- if and (eq $nodes 1) $v.cache.weightsClaim -}}
{{- fail "cache.weightsClaim is for engine.nnodes above 1; leave it empty" -}}
{{- end -}}
{{- $redis := $v.fleet.redis -}}
{{- if and (not $redis.url) (or $redis.user $redis.existingSecret $v.fleet.advertisedUrl) -}}
{{- fail "fleet.redis.url names no Redis, which the other values of fleet require" -}}
{{- end -}}
{{- if lt (int $v.drain.teardownSeconds) 15 -}}
{{- fail "drain.teardownSeconds must be at least 15: 10 s for the last responses, the rest for stopping the engine" -}}
{{- end -}}
{{- $hub := and $v.model.name (not (hasPrefix "/" $v.model.name)) -}}
{{- if and $hub (not $v.model.revision) -}}
{{- fail "model.revision is needed with a model hub id" -}}
{{- end -}}
{{- if and $hub $v.model.offline (not $v.model.existingClaim) -}}
{{- fail "model.name is a model hub id, and model.offline forbids fetching it" -}}
{{- end -}}
{{- if and (hasPrefix "/" $v.model.name) $v.model.existingClaim (not (hasPrefix $v.model.mountPath $v.model.name)) -}}
{{- fail "model.name is not below model.mountPath, where model.existingClaim is mounted" -}}
{{- end -}}
{{- if and $v.cache.existingClaim (or (gt (int $v.replicaCount) 1) (ne $v.autoscaling.kind "none")) -}}
{{- fail "cache.existingClaim cannot be shared by replicas; leave it empty" -}}
{{- end -}}
{{- if gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas) -}}
{{- fail "autoscaling.minReplicas is above autoscaling.maxReplicas" -}}
{{- end -}}
{{- if and $v.serviceMonitor.enabled (ge (trimSuffix "s" $v.serviceMonitor.scrapeTimeout | int) (trimSuffix "s" $v.serviceMonitor.interval | int)) -}}
{{- fail "serviceMonitor.scrapeTimeout must be below serviceMonitor.interval" -}}
{{- end -}}
{{- end -}}
