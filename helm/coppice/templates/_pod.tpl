{{/* Pod template of the Deployment, or of the LeaderWorkerSet, whose pods are all alike. */}}
{{- define "coppice.podTemplate" -}}
{{- $startup := .Values.probes.startup -}}
metadata:
  labels:
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- include "coppice.labels" . | nindent 4 }}
  annotations:
    checksum/settings: {{ include "coppice.settings" . | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "coppice.serviceAccountName" . }}
  automountServiceAccountToken: false
  # A Service named vllm would set VLLM_PORT=tcp://..., which vLLM cannot parse.
  enableServiceLinks: false
  # drain.endpointSeconds + drain.requestSeconds + drain.teardownSeconds
  terminationGracePeriodSeconds: {{ include "coppice.graceSeconds" . }}
  securityContext:
    {{- toYaml .Values.podSecurityContext | nindent 4 }}
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with .Values.scheduling }}
  {{- with .nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    - labelSelector:
        matchLabels:
          {{- include "coppice.selector" $ | nindent 10 }}
      {{- toYaml . | nindent 6 }}
    {{- end }}
  {{- end }}
  {{- with .priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- end }}
  containers:
    - name: coppice
      image: {{ include "coppice.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [serve, --config, /etc/coppice/settings/settings.yaml]
      ports:
        - name: http
          containerPort: {{ .Values.containerPort }}
        {{- if gt (int .Values.operatorsPort) 0 }}
        - name: operators
          containerPort: {{ .Values.operatorsPort }}
        {{- end }}
      env:
        - name: HF_HUB_OFFLINE
          value: {{ ternary "1" "0" .Values.model.offline | quote }}
        # The image sets a default in its environment, which takes precedence over the file.
        - name: COPPICE_LOG__FORMAT
          value: {{ .Values.log.format | quote }}
        {{- if gt (include "coppice.nnodes" . | int) 1 }}
        # Set in front of these by LeaderWorkerSet's webhook.
        - name: COPPICE_ENGINE__MASTER_ADDR
          value: $(LWS_LEADER_ADDRESS)
        - name: COPPICE_ENGINE__NODE_RANK
          value: $(LWS_WORKER_INDEX)
        {{- end }}
        {{- if .Values.fleet.redis.url }}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: COPPICE_SERVER__ADVERTISED_URL
          value: {{ include "coppice.advertisedUrl" . | quote }}
        {{- end }}
        {{- with .Values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      startupProbe:
        httpGet: {path: /startupz, port: http}
        periodSeconds: {{ $startup.periodSeconds }}
        timeoutSeconds: 5
        # probes.startup.maxSeconds divided by its period, rounded up
        failureThreshold: {{ div (add (int $startup.maxSeconds) (sub (int $startup.periodSeconds) 1)) (int $startup.periodSeconds) }}
      readinessProbe:
        httpGet: {path: /readyz, port: http}
        {{- toYaml .Values.probes.readiness | nindent 8 }}
      livenessProbe:
        httpGet: {path: /livez, port: http}
        {{- toYaml .Values.probes.liveness | nindent 8 }}
      lifecycle:
        preStop:
          exec:
            command: [sleep, {{ .Values.drain.endpointSeconds | quote }}]
      securityContext:
        {{- toYaml .Values.securityContext | nindent 8 }}
      resources:
        {{- $resources := deepCopy .Values.resources }}
        {{- if gt (int .Values.gpu.count) 0 }}
        {{- $_ := set $resources.limits .Values.gpu.resourceName (int .Values.gpu.count) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: settings, mountPath: /etc/coppice/settings, readOnly: true}
        {{- if .Values.auth.existingSecret }}
        - {name: keys, mountPath: /etc/coppice/keys, readOnly: true}
        {{- end }}
        {{- if .Values.fleet.redis.existingSecret }}
        - {name: redis, mountPath: /etc/coppice/redis, readOnly: true}
        {{- end }}
        - {name: cache, mountPath: /cache}
        {{- if gt (include "coppice.nnodes" . | int) 1 }}
        # A folder for each replica, whose pods have the same first pod.
        - {name: weights, mountPath: /weights, subPathExpr: $(LWS_LEADER_ADDRESS)}
        {{- end }}
        - {name: shm, mountPath: /dev/shm}
        {{- if .Values.model.existingClaim }}
        - {name: model, mountPath: {{ .Values.model.mountPath }}, readOnly: true}
        {{- end }}
        {{- with .Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: settings
      configMap:
        name: {{ include "coppice.fullname" . }}
    {{- with .Values.auth.existingSecret }}
    # A directory instead of a single file (subPath), so that changes of the Secret reach the pod.
    - name: keys
      secret:
        secretName: {{ . }}
        defaultMode: 0440
        items:
          - {key: {{ $.Values.auth.secretKey }}, path: keys.yaml}
          {{- with $.Values.auth.peerSecretKey }}
          - {key: {{ . }}, path: peer-key}
          {{- end }}
    {{- end }}
    {{- with .Values.fleet.redis.existingSecret }}
    - name: redis
      secret:
        secretName: {{ . }}
        defaultMode: 0440
        items:
          - {key: {{ $.Values.fleet.redis.secretKey }}, path: password}
    {{- end }}
    - name: cache
      {{- if .Values.cache.existingClaim }}
      persistentVolumeClaim:
        claimName: {{ .Values.cache.existingClaim }}
      {{- else }}
      emptyDir:
        sizeLimit: {{ .Values.cache.size }}
      {{- end }}
    {{- with .Values.cache.weightsClaim }}
    - name: weights
      persistentVolumeClaim:
        claimName: {{ . }}
    {{- end }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ include "coppice.shmMount" . | quote }}
    {{- with .Values.model.existingClaim }}
    - name: model
      persistentVolumeClaim:
        claimName: {{ . }}
        readOnly: true
    {{- end }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
