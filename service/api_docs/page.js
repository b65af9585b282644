// Swagger UI of the contract that this server serves. Every request goes to this server.
window.addEventListener("DOMContentLoaded", () => {
  SwaggerUIBundle({
    url: "openapi.yaml",
    dom_id: "#api",
    deepLinking: true,
    docExpansion: "list",
    defaultModelsExpandDepth: 0,
    validatorUrl: null, // otherwise the contract is sent to a validator on the internet
  });
});
