// Refreshes what is shown, and shows how far an upload is. The page works without it.
"use strict";
(() => {
  const connection = document.getElementById("connection");
  const SLOWEST_S = 60;
  let etag = "", numFailures = 0, timer = 0;

  // Refreshing: the regions of the new page replace those of this one, node by node, so that focus, selections and
  // opened parts stay.

  const isSame = (one, other) => one.nodeType === other.nodeType && one.nodeName === other.nodeName
    && (one.id || "") === (other.id || "");

  function morph(node, wanted) {
    if (node.nodeType !== Node.ELEMENT_NODE) {
      if (node.nodeValue !== wanted.nodeValue) node.nodeValue = wanted.nodeValue;
      return;
    }
    for (const { name } of [...node.attributes]) {
      if (!wanted.hasAttribute(name) && name !== "open") node.removeAttribute(name);
    }
    for (const { name, value } of wanted.attributes) {
      if (node.getAttribute(name) !== value && name !== "open") node.setAttribute(name, value);
    }
    let next = node.firstChild;
    for (const child of [...wanted.childNodes]) {
      let found = next;
      while (found && !isSame(found, child)) found = found.nextSibling;
      if (!found) {
        node.insertBefore(document.importNode(child, true), next);
        continue;
      }
      if (found === next) next = next.nextSibling;
      else node.insertBefore(found, next);
      morph(found, child);
    }
    while (next) {
      const rest = next.nextSibling;
      next.remove();
      next = rest;
    }
  }

  function showLocalTimes() {
    for (const time of document.querySelectorAll("time")) time.title = new Date(time.dateTime).toLocaleString();
  }

  async function refresh() {
    clearTimeout(timer);
    if (document.hidden) return; // `visibilitychange` continues
    try {
      const headers = etag ? { "If-None-Match": etag } : {};
      const response = await fetch(location.href, { headers, cache: "no-store", redirect: "error" });
      if (response.status === 401) return void location.reload(); // the session is over
      if (response.status === 200) {
        etag = response.headers.get("ETag") || "";
        const page = new DOMParser().parseFromString(await response.text(), "text/html");
        for (const region of document.querySelectorAll("[data-live]")) {
          const wanted = page.getElementById(region.id);
          if (wanted) morph(region, wanted);
        }
        const token = page.querySelector("[name=token]"); // another one if the server has been started again
        if (token) for (const field of document.querySelectorAll("[name=token]")) field.value = token.value;
        showLocalTimes();
      } else if (response.status !== 304) throw new Error(response.statusText);
      numFailures = 0;
    } catch {
      numFailures += 1;
      connection.textContent = "The server does not answer. Trying again …";
    }
    connection.hidden = numFailures < 2;
    schedule();
  }

  function schedule() {
    const region = document.querySelector("[data-refresh]");
    if (!region) return;
    const seconds = Math.min(SLOWEST_S, Number(region.dataset.refresh) * 2 ** numFailures);
    clearTimeout(timer);
    timer = setTimeout(refresh, seconds * 1000);
  }

  showLocalTimes();
  schedule();
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && document.querySelector("[data-refresh]")) refresh();
  });

  // Uploads

  const form = document.getElementById("upload");
  if (!form) return;
  const file = form.querySelector("input[type=file]"), button = form.querySelector("button");
  const bar = form.querySelector("progress"), problem = form.querySelector("[role=alert]");

  function stop(text) {
    button.disabled = false;
    button.textContent = "Upload and check";
    bar.hidden = true;
    problem.hidden = false;
    problem.textContent = text;
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (file.files[0].size > Number(form.dataset.maxBytes)) return stop("The file is too large.");
    const request = new XMLHttpRequest();
    request.open("POST", form.action);
    request.setRequestHeader("X-Page-Token", form.elements.token.value);
    request.upload.addEventListener("progress", ({ loaded, total }) => {
      bar.value = (100 * loaded) / total;
      if (loaded === total) button.textContent = "Checking …";
    });
    request.addEventListener("load", () => {
      if (request.status < 400) return location.assign(request.responseURL);
      const page = new DOMParser().parseFromString(request.responseText, "text/html");
      const message = page.getElementById("message");
      stop(message ? message.textContent : "The session is over. Reload the page to sign in.");
    });
    request.addEventListener("error", () => stop("The upload was interrupted. Try again."));
    problem.hidden = true;
    bar.hidden = false;
    bar.value = 0;
    button.disabled = true;
    button.textContent = "Uploading …";
    request.send(new FormData(form));
  });

  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    if (!event.dataTransfer.files.length || button.disabled) return;
    document.getElementById("new").open = true;
    file.files = event.dataTransfer.files;
    button.focus();
  });
})();
