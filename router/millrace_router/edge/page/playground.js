// One chat request to the public HTTP API. The key stays in its field: nothing stores it, and the form is not submitted.
const OF_CHART = "kubectl port-forward deployment/millrace-router 8001 8000";

export class Playground {
  constructor(find) {
    this.find = find;
    this.sending = null;  // what ends the request that runs
    find("chat").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.sending) this.sending.abort(); else this.send();
    });
  }

  // router: of /workers
  found(router) {
    this.url = `${router.http_tls ? "https" : "http"}://${location.hostname}:${router.http_port}`;
    this.find("api").textContent = `${this.url}/v1/chat/completions`;
  }

  async send() {
    const { find } = this, begun = performance.now();
    this.sending = new AbortController();
    find("send").textContent = "Stop";
    find("answer").textContent = find("facts").textContent = "";
    try {
      const answer = await this.ask(this.sending.signal);
      if (!answer.ok) throw new Error(await refusal(answer));
      await this.read(answer.body, begun);
    } catch (error) {
      find("facts").textContent = error.name === "AbortError" ? "Stopped." : error.message;
    } finally {
      this.sending = null;
      find("send").textContent = "Send";
    }
  }

  async ask(signal) {
    const value = (name) => this.find(name).value, key = value("key").trim();
    const body = {
      messages: [{ role: "user", content: value("message") }], max_tokens: Number(value("max-tokens")),
      temperature: Number(value("temperature")), stream: true, stream_options: { include_usage: true },
    };
    const headers = { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
    const options = { method: "POST", headers, body: JSON.stringify(body), signal, credentials: "omit", referrerPolicy: "no-referrer" };
    try {
      return await fetch(`${this.url}/v1/chat/completions`, options);
    } catch (error) {
      throw error.name === "AbortError" ? error : new Error(await this.why(error));
    }
  }

  // The browser does not tell a refusal from silence. An answer that no page may read shows which it was.
  async why(error) {
    try {
      await fetch(`${this.url}/health`, { mode: "no-cors", credentials: "omit" });
    } catch {
      return `Nothing answers this page at ${this.url} (${error.message}). On Kubernetes forward both ports: ${OF_CHART}`;
    }
    return `The router does not let this page read its answers. Add "${location.origin}" to its setting connections.cors.`;
  }

  async read(body, begun) {
    let first, usage, rest = "";
    for await (const piece of body.pipeThrough(new TextDecoderStream())) {
      const events = (rest + piece).split("\n\n");
      rest = events.pop();
      for (const data of events.filter((event) => event.startsWith("data: {")).map((event) => JSON.parse(event.slice(6)))) {
        if (data.error) throw new Error(data.error.message);
        const delta = data.choices[0]?.delta ?? {}, text = (delta.reasoning_content ?? "") + (delta.content ?? "");
        if (text) first ??= performance.now();
        this.find("answer").append(text);
        usage = data.usage ?? usage;
      }
    }
    const ended = performance.now(), tokens = usage?.completion_tokens ?? 0;
    this.find("facts").textContent = `${tokens} tokens in ${((ended - begun) / 1000).toFixed(2)} s, the first text after `
      + `${Math.round((first ?? ended) - begun)} ms`;
  }
}

async function refusal(answer) {
  const message = await answer.json().then((body) => body.error.message, () => answer.statusText);
  return `${answer.status}: ${message}${answer.status === 401 ? ". Type an API key." : ""}`;
}
