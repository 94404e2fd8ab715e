// Shows the OpenAPI document in Swagger UI. A key of the console in this tab is used to try routes.

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => document.documentElement.classList.toggle("dark-mode", prefersDark.matches);
prefersDark.addEventListener("change", follow);
follow();

async function show() {
  const answer = await fetch("openapi.json");
  const spec = await answer.json();
  // Behind a proxy, the API has the same prefix as this page.
  spec.servers = [{ url: new URL(".", location.href).pathname.replace(/\/$/, "") || "/" }];
  const ui = SwaggerUIBundle({
    spec,
    dom_id: "#reader",
    deepLinking: true,
    docExpansion: "list",
    defaultModelRendering: "example",
    defaultModelExpandDepth: 2,
    defaultModelsExpandDepth: 0,
    displayRequestDuration: true,
    filter: true,
    validatorUrl: null,
    onComplete: () => {
      const key = sessionStorage.getItem("slora.key");
      if (key !== null) ui.preauthorizeApiKey("api_key", key);
    },
  });
}

show().catch((error) => {
  document.getElementById("reader").textContent = `The reference can't be shown: ${error.message}`;
});
